//! Black-box tests against a running dev cluster.
