//! Builds the OCI images of the dev cluster from Debian packages and pushes them.
fn main() {}
