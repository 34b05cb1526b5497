//! Creates and renews the certificates of a Sandman fleet and of the dev cluster.
fn main() {}
