//! The kubelet API of the node.
