//! The self-test of EROFS over a file of our FUSE file system.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::probe::{BLOB_BYTES, Files, PATIENCE, ProbeError, io, judge, read};
use crate::fuse::{Service, Step};
use crate::sys::fanotify::Verdict;
use crate::{LayerDigest, layout, mount};

/// Any name does.
const LAYER: LayerDigest = LayerDigest([0xA5; 32]);

/// One layer, read through the file system while its first read is taken twice, as it is when a
/// keeper ends.
pub(super) fn probe(files: &Files) -> Result<(), ProbeError> {
    let mut service = Service::start().map_err(|(what, source)| ProbeError::Io { what, source })?;
    let blob = files.writer.try_clone().map_err(io("open a blob"))?;
    service
        .files_mut()
        .insert(LAYER, blob.into(), BLOB_BYTES.into(), 0)
        .map_err(|_| io("name a file")(io::ErrorKind::AlreadyExists.into()))?;
    let tree = service
        .tree()
        .try_clone_to_owned()
        .map_err(io("hold a folder"))?;
    let (stop, running) = std::io::pipe().map_err(io("make a pipe"))?;
    let bytes = std::thread::scope(|scope| {
        // Should it fail, the end of the connection lets the reader go.
        let server = scope.spawn(move || serve(service, files, &stop.into()));
        let bytes = mount_and_read(files, &tree);
        drop(running);
        server.join().map_err(|_| ProbeError::WrongBytes)??;
        bytes
    })?;
    judge(&bytes)
}

fn mount_and_read(files: &Files, tree: &OwnedFd) -> Result<Vec<u8>, ProbeError> {
    let folder = format!("/proc/self/fd/{}", tree.as_raw_fd());
    let file = std::path::Path::new(&folder).join(layout::folder_name(LAYER));
    let mount = mount::layer_over_fuse(&files.meta, &file)?;
    read(mount.as_fd())
}

fn serve(mut service: Service, files: &Files, stop: &OwnedFd) -> Result<(), ProbeError> {
    let patience = Timespec::try_from(PATIENCE).map_err(|_| ProbeError::NotAsked)?;
    let (mut asked, mut again) = (false, false);
    loop {
        let mut wanted = [
            PollFd::new(&service, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        let ready = poll(&mut wanted, Some(&patience)).map_err(|errno| io("wait")(errno.into()))?;
        let ended = !wanted[1].revents().is_empty();
        if ready == 0 || (ended && !asked) {
            return Err(ProbeError::NotAsked);
        }
        if ended {
            return again.then_some(()).ok_or(ProbeError::NotResent);
        }
        match service.step().map_err(io("take a request"))? {
            Step::Question(_) if !asked => {
                asked = true;
                service.resend().map_err(|_| ProbeError::NotResent)?;
            }
            Step::Question(read) => {
                again = true;
                files.fill().map_err(io("write a blob"))?;
                service
                    .answer(read.unique, read.layer, read.range, Verdict::Allow)
                    .map_err(io("answer a request"))?;
            }
            Step::Idle | Step::Done | Step::Unknown | Step::Gone(_) => {}
        }
    }
}
