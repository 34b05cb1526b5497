//! Host service of Sandman: makes the sandboxes of one host true through containerd.
