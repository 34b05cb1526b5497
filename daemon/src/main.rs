//! Static in-sandbox agent: PID 1 of every container, usable in any image.
fn main() {}
