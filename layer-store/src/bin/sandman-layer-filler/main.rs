//! `sandman-layer-filler`: the part of the layer store that touches bytes from outside.
//!
//! `convert ORDER` turns one blob into a layer, confined; the layer store starts it by itself.

use std::process::ExitCode;

use sandman_layer_store::convert;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>()
        .as_slice()
    {
        ["convert", order] => convert::run_child(order),
        _ => {
            eprintln!(
                "usage: sandman-layer-filler convert ORDER\n\nRun by the layer store, not by hand."
            );
            ExitCode::from(2)
        }
    }
}
