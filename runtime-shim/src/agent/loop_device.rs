//! Attaches a file to a free loop device, read-only, until its last user is gone.
#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;

use nix::errno::Errno;

const CONTROL: &str = "/dev/loop-control";
/// Others may take the device between the question and the attachment.
const TRIES: usize = 32;

const LO_FLAGS_READ_ONLY: u32 = 1;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// `struct loop_config` of linux/loop.h; `info` is a `struct loop_info64` of which only the flags
/// are set.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info_head: [u8; 52],
    flags: u32,
    info_tail: [u8; 176],
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<LoopConfig>() == 304);

nix::ioctl_none_bad!(loop_ctl_get_free, 0x4C82);
nix::ioctl_write_ptr_bad!(loop_configure, 0x4C0A, LoopConfig);

/// An attached device. The kernel detaches it when neither this nor a mount uses it.
pub(super) struct LoopDevice {
    pub(super) path: PathBuf,
    _device: File,
}

pub(super) fn attach(file: &File) -> io::Result<LoopDevice> {
    let control = OpenOptions::new().read(true).write(true).open(CONTROL)?;
    for _ in 0..TRIES {
        // SAFETY: the descriptor is open for the whole call, which takes no argument.
        let number = unsafe { loop_ctl_get_free(control.as_raw_fd()) }?;
        let path = PathBuf::from(format!("/dev/loop{number}"));
        let device = OpenOptions::new().read(true).open(&path)?;
        match configure(device.as_raw_fd(), file.as_raw_fd()) {
            Ok(()) => {
                return Ok(LoopDevice {
                    path,
                    _device: device,
                });
            }
            Err(Errno::EBUSY) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::Error::new(
        io::ErrorKind::ResourceBusy,
        "no free loop device",
    ))
}

fn configure(device: RawFd, file: RawFd) -> Result<(), Errno> {
    let config = LoopConfig {
        fd: u32::try_from(file).map_err(|_| Errno::EBADF)?,
        block_size: 0,
        info_head: [0; 52],
        flags: LO_FLAGS_READ_ONLY | LO_FLAGS_AUTOCLEAR,
        info_tail: [0; 176],
        reserved: [0; 8],
    };
    // SAFETY: both descriptors are open and `config` has the layout that the kernel reads.
    unsafe { loop_configure(device, &raw const config) }?;
    Ok(())
}
