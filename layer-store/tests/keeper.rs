//! The keeper against the kernel: no reader ever sees a byte that was not filled in.
//!
//! Each test runs for both ways of being asked. They need root and a kernel that has the way; where
//! the self-test of `chain` fails, a test says so and does nothing.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Barrier, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use sandman_layer_store::chain::{self, Member, image};
use sandman_layer_store::keeper::{
    Asked, Custodian, FillerLink, GroupId, KeeperConfig, KeeperError, KeeperEvent, Limits, Verdict,
};
use sandman_layer_store::{LayerDigest, layout, mount};

const LAYER: LayerDigest = LayerDigest([0x5A; 32]);
const PAGE: u64 = 4096;
/// Nothing here takes this long; it only ends a test that hangs.
const PATIENCE: Duration = Duration::from_secs(60);

struct Store {
    folder: tempfile::TempDir,
    config: KeeperConfig,
    events: Mutex<Receiver<KeeperEvent>>,
    custodian: Option<Custodian>,
    blob: Option<OwnedFd>,
    mount: Option<OwnedFd>,
}

/// What a page of the blob holds once it is filled.
fn content(page: u64) -> [u8; PAGE as usize] {
    [u8::try_from(page % 251).unwrap() + 1; PAGE as usize]
}

impl Store {
    /// A keeper and one mounted layer of `pages`, none of which is there. None where the kernel
    /// cannot do it.
    fn new(member: Member, pages: u32, deadline: Duration) -> Option<Self> {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        if let Err(error) = chain::probe(member, folder.path()) {
            eprintln!("skipped: {error}");
            return None;
        }
        let layer = folder.path().join(layout::folder_name(LAYER));
        std::fs::create_dir(&layer).unwrap();
        let size = pages * u32::try_from(PAGE).unwrap();
        std::fs::write(layer.join(layout::META), image::one_file(size)).unwrap();
        let blob = File::create(layer.join(layout::BLOB)).unwrap();
        blob.set_len(size.into()).unwrap();
        let config = KeeperConfig {
            root: folder.path().to_owned(),
            socket: folder.path().join("socket"),
            program: Some(env!("CARGO_BIN_EXE_sandman-layer-keeper").into()),
            limits: Limits {
                deadline_ms: u32::try_from(deadline.as_millis()).unwrap(),
                slots: 2048,
                gate: member.gate(),
            },
        };
        let mut store = Self {
            folder,
            config,
            events: Mutex::new(mpsc::channel().1),
            custodian: None,
            blob: None,
            mount: None,
        };
        store.begin(None);
        store.mount();
        Some(store)
    }

    fn begin(&mut self, expected: Option<GroupId>) {
        let (send, events) = mpsc::channel();
        let listener = move |event| {
            let _ = send.send(event);
        };
        self.custodian = Some(Custodian::new(self.config.clone(), expected, listener).unwrap());
        self.events = Mutex::new(events);
    }

    fn mount(&mut self) {
        self.blob = Some(self.custodian().watch(LAYER).unwrap());
        let layer = self.folder.path().join(layout::folder_name(LAYER));
        let blob = layer.join(layout::BLOB);
        let device = self.custodian().device(LAYER, &blob).unwrap();
        self.mount = Some(device.mount(&layer.join(layout::META)).unwrap());
    }

    fn custodian(&self) -> &Custodian {
        self.custodian.as_ref().unwrap()
    }

    fn open(&self) -> File {
        let mount = self.mount.as_ref().unwrap();
        let file = rustix::fs::openat(mount, image::FILE, OFlags::CLOEXEC, Mode::empty());
        File::from(file.unwrap())
    }

    fn reader(&self, page: u64) -> JoinHandle<io::Result<[u8; PAGE as usize]>> {
        let file = self.open();
        let reader = std::thread::Builder::new()
            .stack_size(128 << 10)
            .spawn(move || {
                let mut bytes = [0; PAGE as usize];
                file.read_exact_at(&mut bytes, page * PAGE)?;
                Ok(bytes)
            });
        reader.unwrap()
    }

    fn filler(&self) -> FillerLink {
        FillerLink::connect(&self.config.socket).unwrap()
    }

    fn fill(&self, asked: &Asked) {
        assert_eq!(asked.layer, LAYER);
        let blob = File::from(self.blob.as_ref().unwrap().try_clone().unwrap());
        let size = blob.metadata().unwrap().len();
        let end = (asked.range.offset + asked.range.count).min(size);
        for page in asked.range.offset / PAGE..end.div_ceil(PAGE) {
            blob.write_all_at(&content(page), page * PAGE).unwrap();
        }
    }

    /// Fills and answers `questions`.
    fn serve(&self, filler: &FillerLink, questions: usize) {
        for _ in 0..questions {
            let asked = filler.next().unwrap();
            self.fill(&asked);
            filler.answer(asked.event, Verdict::Allow).unwrap();
        }
    }

    fn kill_keeper(&self) {
        let pid = self.custodian().keeper_pid().unwrap();
        let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
        kill_process(pid, Signal::KILL).unwrap();
    }

    fn hears(&self) -> KeeperEvent {
        self.events.lock().unwrap().recv_timeout(PATIENCE).unwrap()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // The keeper outlives its custodian by design; not so here.
        if self
            .custodian
            .as_ref()
            .is_some_and(|custodian| custodian.keeper_pid().is_some())
        {
            let pid = self.custodian().keeper_pid().unwrap();
            self.custodian = None;
            let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
            kill_process(pid, Signal::KILL).unwrap();
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
        }
    }
}

fn readers_get_what_is_filled(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let reader = store.reader(5);
    store.serve(&store.filler(), 1);
    assert_eq!(reader.join().unwrap().unwrap(), content(5));
    let status = store.custodian().controller().unwrap().status().unwrap();
    assert_eq!((status.asked, status.open, status.refused), (1, 0, 0));
    assert_eq!(status.watched, 1);
}

fn the_next_filler_gets_what_the_last_did_not_answer(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let reader = store.reader(3);
    let first = store.filler();
    let lost = first.next().unwrap();
    drop(first);
    let second = store.filler();
    let again = second.next().unwrap();
    assert_eq!(lost, again);
    store.fill(&again);
    second.answer(again.event, Verdict::Allow).unwrap();
    assert_eq!(reader.join().unwrap().unwrap(), content(3));
}

fn a_newer_filler_replaces_an_older(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let first = store.filler();
    let second = store.filler();
    assert!(matches!(first.next(), Err(KeeperError::Unreachable(_))));
    let reader = store.reader(0);
    store.serve(&second, 1);
    assert_eq!(reader.join().unwrap().unwrap(), content(0));
}

fn readers_wait_for_the_keepers_successor(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let group = store.custodian().group();
    // One question that was handed on, and one that comes while nobody listens.
    let first = store.reader(1);
    let filler = store.filler();
    filler.next().unwrap();
    store.kill_keeper();
    let second = store.reader(40);
    assert_eq!(store.hears(), KeeperEvent::Resumed);
    assert!(matches!(filler.next(), Err(KeeperError::Unreachable(_))));
    store.serve(&store.filler(), 2);
    assert_eq!(first.join().unwrap().unwrap(), content(1));
    assert_eq!(second.join().unwrap().unwrap(), content(40));
    assert_eq!(store.custodian().group(), group);
    // What is watched later is asked about as well, by the same group.
    let third = store.reader(60);
    store.serve(&store.filler(), 1);
    assert_eq!(third.join().unwrap().unwrap(), content(60));
}

fn no_reader_sees_zeros_while_the_keeper_is_killed_again_and_again(member: Member) {
    let Some(store) = Store::new(member, 2048, PATIENCE) else {
        return;
    };
    let store = Arc::new(store);
    let (stop, stopped) = mpsc::channel::<()>();
    let filler = {
        let store = Arc::clone(&store);
        std::thread::spawn(move || {
            while stopped.try_recv() != Err(mpsc::TryRecvError::Disconnected) {
                let Ok(link) = FillerLink::connect(&store.config.socket) else {
                    std::thread::yield_now();
                    continue;
                };
                while let Ok(asked) = link.next() {
                    store.fill(&asked);
                    if link.answer(asked.event, Verdict::Allow).is_err() {
                        break;
                    }
                }
            }
        })
    };
    for round in 0..8 {
        let pages = (0..32).map(|n| round * 256 + n * 8);
        let readers: Vec<_> = pages.map(|page| (page, store.reader(page))).collect();
        store.kill_keeper();
        assert_eq!(store.hears(), KeeperEvent::Resumed);
        for (page, reader) in readers {
            match reader.join().unwrap() {
                Ok(bytes) => assert_eq!(bytes, content(page)),
                // Read by the keeper and not recorded when it was killed.
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(libc::EIO));
                    assert_eq!(member, Member::Fanotify, "FUSE asks again");
                }
            }
        }
    }
    drop(stop);
    // A last connection replaces the filler's, which ends its wait.
    drop(store.filler());
    filler.join().unwrap();
}

fn the_loss_of_the_group_is_told(member: Member) {
    let Some(mut store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let group = store.custodian().group();
    let pid = store.custodian().keeper_pid().unwrap();
    // Both holders of the group end.
    store.custodian = None;
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
    store.begin(group);
    assert_eq!(store.hears(), KeeperEvent::GroupLost(group.unwrap()));
    assert_ne!(store.custodian().group(), group);
    if member == Member::Fuse {
        // Unlike with fanotify nobody can have seen zeros.
        let error = store.reader(7).join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    // A new mount under the new group works.
    store.mount = None;
    store.mount();
    let reader = store.reader(7);
    store.serve(&store.filler(), 1);
    assert_eq!(reader.join().unwrap().unwrap(), content(7));
}

fn a_custodian_that_returns_finds_the_same_group(member: Member) {
    let Some(mut store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let group = store.custodian().group();
    let pid = store.custodian().keeper_pid().unwrap();
    store.custodian = None;
    store.begin(group);
    assert_eq!(store.custodian().group(), group);
    assert_eq!(
        store.events.lock().unwrap().try_recv(),
        Err(mpsc::TryRecvError::Empty)
    );
    let reader = store.reader(9);
    store.serve(&store.filler(), 1);
    assert_eq!(reader.join().unwrap().unwrap(), content(9));
    // The returned custodian did not start it.
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
    assert_eq!(store.hears(), KeeperEvent::Resumed);
}

fn a_deadline_ends_in_an_error(member: Member) {
    let Some(store) = Store::new(member, 64, Duration::from_millis(50)) else {
        return;
    };
    let error = store.reader(2).join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let status = store.custodian().controller().unwrap().status().unwrap();
    // The kernel reads ahead, and then tries again for the one page.
    assert!(status.expired >= 1, "{status:?}");
    assert_eq!((status.refused, status.open), (0, 0));
}

fn refusals_are_errors_that_do_not_stay(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    for verdict in [Verdict::InputOutputError, Verdict::NoSpace] {
        let filler = Arc::new(store.filler());
        let ender = {
            let (filler, reader) = (Arc::clone(&filler), store.reader(8));
            std::thread::spawn(move || {
                let read = reader.join().unwrap();
                filler.close();
                read
            })
        };
        // After a refusal the kernel asks once more, for less.
        while let Ok(asked) = filler.next() {
            filler.answer(asked.event, verdict).unwrap();
        }
        // EROFS makes EIO of whatever failed below it.
        let error = ender.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }
    let filler = store.filler();
    let reader = store.reader(8);
    store.serve(&filler, 1);
    assert_eq!(reader.join().unwrap().unwrap(), content(8));
}

fn a_thousand_readers_at_once(member: Member) {
    let pages = 32 * 1024;
    let Some(store) = Store::new(member, pages, PATIENCE) else {
        return;
    };
    let start = Arc::new(Barrier::new(1000));
    let readers: Vec<_> = (0..1000)
        .map(|n| {
            let (file, start) = (store.open(), Arc::clone(&start));
            let page = n * 32;
            let reader = std::thread::Builder::new()
                .stack_size(128 << 10)
                .spawn(move || {
                    let mut bytes = [0; PAGE as usize];
                    start.wait();
                    file.read_exact_at(&mut bytes, page * PAGE).unwrap();
                    assert_eq!(bytes, content(page));
                });
            reader.unwrap()
        })
        .collect();
    let filler = Arc::new(store.filler());
    let ender = {
        let filler = Arc::clone(&filler);
        std::thread::spawn(move || {
            readers
                .into_iter()
                .for_each(|reader| reader.join().unwrap());
            filler.close();
        })
    };
    while let Ok(asked) = filler.next() {
        store.fill(&asked);
        filler.answer(asked.event, Verdict::Allow).unwrap();
    }
    ender.join().unwrap();
}

fn a_waiting_reader_can_be_killed(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let filler = store.filler();
    let mut cat = Command::new("cat")
        .stdin(Stdio::from(store.open()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let asked = filler.next().unwrap();
    cat.kill().unwrap();
    assert!(!cat.wait().unwrap().success());
    // The answer comes too late and harms nobody.
    filler
        .answer(asked.event, Verdict::InputOutputError)
        .unwrap();
    // What the kernel read ahead for the killed one may still be asked about.
    let filler = Arc::new(filler);
    let ender = {
        let (filler, reader) = (Arc::clone(&filler), store.reader(0));
        std::thread::spawn(move || {
            let read = reader.join().unwrap();
            filler.close();
            read
        })
    };
    while let Ok(asked) = filler.next() {
        store.fill(&asked);
        filler.answer(asked.event, Verdict::Allow).unwrap();
    }
    assert_eq!(ender.join().unwrap().unwrap(), content(0));
}

fn a_complete_blob_is_read_without_questions(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let blob = File::from(store.blob.as_ref().unwrap().try_clone().unwrap());
    for page in 0..64 {
        blob.write_all_at(&content(page), page * PAGE).unwrap();
    }
    let layer = store.folder.path().join(layout::folder_name(LAYER));
    std::fs::write(layer.join(layout::SEALED), []).unwrap();
    let controller = store.custodian().controller().unwrap();
    controller.unwatch(LAYER).unwrap();
    assert_eq!(store.reader(33).join().unwrap().unwrap(), content(33));
    let status = controller.status().unwrap();
    assert_eq!((status.asked, status.watched), (0, 0));
    controller.unwatch(LAYER).unwrap();
}

fn mounts_outlive_who_made_them(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    store
        .custodian()
        .keep_mount(LAYER, store.mount.as_ref().unwrap().as_fd())
        .unwrap();
    store.kill_keeper();
    assert_eq!(store.hears(), KeeperEvent::Resumed);
    let controller = store.custodian().controller().unwrap();
    let kept = controller.mount(LAYER).unwrap();
    let mounted = store.mount.as_ref().unwrap();
    assert_eq!(
        mount::device(kept.as_fd()).unwrap(),
        mount::device(mounted.as_fd()).unwrap()
    );
    controller.drop_mount(LAYER).unwrap();
    assert!(matches!(
        controller.mount(LAYER),
        Err(KeeperError::Refused { .. })
    ));
}

fn a_second_keeper_for_a_store_is_refused(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let output = Command::new(env!("CARGO_BIN_EXE_sandman-layer-keeper"))
        .arg("--root")
        .arg(store.folder.path())
        .arg("--socket")
        .arg(store.folder.path().join("other"))
        .output()
        .unwrap();
    assert!(!output.status.success());
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(words.contains("another keeper may serve it"), "{words}");
}

fn nobody_watches_what_is_not_there(member: Member) {
    let Some(store) = Store::new(member, 64, PATIENCE) else {
        return;
    };
    let controller = store.custodian().controller().unwrap();
    let error = controller.watch(LayerDigest([0; 32])).unwrap_err();
    assert!(
        matches!(
            error,
            KeeperError::Refused {
                errno: libc::ENOENT,
                ..
            }
        ),
        "{error}"
    );
    // A link in place of a blob is not followed.
    let folder = store
        .folder
        .path()
        .join(layout::folder_name(LayerDigest([1; 32])));
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", folder.join(layout::BLOB)).unwrap();
    let error = controller.watch(LayerDigest([1; 32])).unwrap_err();
    assert!(
        matches!(
            error,
            KeeperError::Refused {
                errno: libc::ELOOP,
                ..
            }
        ),
        "{error}"
    );
}

/// With FUSE a blob can lose its filler while it is open: readers get errors, not holes.
#[test]
fn a_blob_that_nobody_fills_any_more_is_not_read() {
    let Some(store) = Store::new(Member::Fuse, 64, PATIENCE) else {
        return;
    };
    let controller = store.custodian().controller().unwrap();
    controller.unwatch(LAYER).unwrap();
    let error = store.reader(3).join().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    // Watched again, it is filled again, through the mount that was there all the time.
    drop(controller);
    let blob = store.custodian().watch(LAYER).unwrap();
    drop(blob);
    let reader = store.reader(3);
    store.serve(&store.filler(), 1);
    assert_eq!(reader.join().unwrap().unwrap(), content(3));
}

/// The last reader of a complete layer takes its file along, and the copy that the custodian holds.
#[test]
fn a_complete_file_goes_with_its_mount() {
    let Some(mut store) = Store::new(Member::Fuse, 64, PATIENCE) else {
        return;
    };
    let layer = store.folder.path().join(layout::folder_name(LAYER));
    std::fs::write(layer.join(layout::SEALED), []).unwrap();
    store
        .custodian()
        .controller()
        .unwrap()
        .unwatch(LAYER)
        .unwrap();
    store.kill_keeper();
    assert_eq!(store.hears(), KeeperEvent::Resumed);
    store.mount = None;
    // Returns once no copy is held.
    store.custodian().unwatch(LAYER).unwrap();
    let status = store.custodian().controller().unwrap().status().unwrap();
    assert_eq!(status.watched, 0);
}

macro_rules! with {
    ($module:ident, $member:expr, $($name:ident)*) => {
        mod $module {
            use super::Member;
            $(
                #[test]
                fn $name() {
                    super::$name($member);
                }
            )*
        }
    };
}

macro_rules! both {
    ($($name:ident)*) => {
        with!(fanotify, Member::Fanotify, $($name)*);
        with!(fuse, Member::Fuse, $($name)*);
    };
}

both! {
    readers_get_what_is_filled
    the_next_filler_gets_what_the_last_did_not_answer
    a_newer_filler_replaces_an_older
    readers_wait_for_the_keepers_successor
    no_reader_sees_zeros_while_the_keeper_is_killed_again_and_again
    the_loss_of_the_group_is_told
    a_custodian_that_returns_finds_the_same_group
    a_deadline_ends_in_an_error
    refusals_are_errors_that_do_not_stay
    a_thousand_readers_at_once
    a_waiting_reader_can_be_killed
    a_complete_blob_is_read_without_questions
    mounts_outlive_who_made_them
    a_second_keeper_for_a_store_is_refused
    nobody_watches_what_is_not_there
}
