//! Load generator and side-by-side comparison of Sandman with its peers.
fn main() {}
