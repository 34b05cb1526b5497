//! The only file of the `pause` image: a process that holds a pod's namespaces on nodes that need
//! a container for that. Ends when asked to, which PID 1 does only of its own will.

use std::ffi::c_int;

const SIGINT: c_int = 2;
const SIGTERM: c_int = 15;
const SIGCHLD: c_int = 17;
/// The kernel reaps the children of a process that ignores their end.
const SIG_IGN: usize = 1;

unsafe extern "C" {
    fn signal(number: c_int, handler: usize) -> usize;
    safe fn _exit(status: c_int) -> !;
}

extern "C" fn end(_: c_int) {
    _exit(0)
}

fn main() {
    let handler = end as extern "C" fn(c_int) as usize;
    // SAFETY: no other thread runs yet, and the handler does nothing but end the process.
    unsafe {
        signal(SIGINT, handler);
        signal(SIGTERM, handler);
        signal(SIGCHLD, SIG_IGN);
    }
    loop {
        std::thread::park();
    }
}
