//! containerd's runtime `io.containerd.sandman.v1`; see the `cli` module.

fn main() -> std::process::ExitCode {
    sandman_containerd_shim::cli::main()
}
