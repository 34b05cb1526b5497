//! Prints whose rights it has. With the set-user-ID bit on it, the answer tells whether the
//! kernel was allowed to honour that bit.

unsafe extern "C" {
    safe fn geteuid() -> u32;
}

fn main() {
    println!("Effective uid: {}", geteuid());
}
