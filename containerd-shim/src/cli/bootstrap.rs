//! What `start` prints, by containerd's version.
//!
//! Up to 1.7 the address alone. 2.0 sets `MAX_SHIM_VERSION=3` and takes JSON. 2.3 sends
//! `BootstrapParams` on stdin and takes a `BootstrapResult` back; earlier ones send the runtime's
//! options there, in a message that looks alike, so only one that repeats our flags counts.

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::protobuf::Message;
use serde_json::json;

use super::args::Args;

/// First version of the protocol whose `start` prints more than an address.
const V3: u32 = 3;

pub(super) fn answer(
    args: &Args,
    input: &[u8],
    address: &str,
    max_version: Option<u32>,
) -> anyhow::Result<Vec<u8>> {
    let params = BootstrapParams::parse_from_bytes(input).ok();
    if params.is_some_and(|p| p.instance_id == args.id && p.namespace == args.namespace) {
        let result = BootstrapResult {
            version: 3,
            address: address.to_owned(),
            protocol: "ttrpc".to_owned(),
            ..Default::default()
        };
        return Ok(result.write_to_bytes()?);
    }
    if max_version.is_some_and(|version| version >= V3) {
        let result = json!({ "version": 3, "address": address, "protocol": "ttrpc" });
        return Ok(result.to_string().into_bytes());
    }
    Ok(address.as_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::protobuf::well_known_types::any::Any;

    use super::{Args, BootstrapParams, BootstrapResult, Message, answer};

    fn args() -> Args {
        let words = ["-namespace", "ns", "-address", "/c", "-id", "x", "start"];
        Args::parse(words.map(Into::into)).unwrap()
    }

    fn text(input: &[u8], version: Option<u32>) -> String {
        String::from_utf8(answer(&args(), input, "unix:///s", version).unwrap()).unwrap()
    }

    #[test]
    fn by_version() {
        assert_eq!(text(b"", None), "unix:///s");
        assert_eq!(text(b"", Some(2)), "unix:///s");
        let json: serde_json::Value = serde_json::from_str(&text(b"", Some(3))).unwrap();
        assert_eq!(json["version"], 3);
        assert_eq!(json["protocol"], "ttrpc");
        assert_eq!(json["address"], "unix:///s");
    }

    #[test]
    fn parameters_are_told_from_options() {
        let options = Any {
            type_url: "containerd.runc.v1.Options".into(),
            value: vec![1, 2],
            ..Default::default()
        };
        assert_eq!(text(&options.write_to_bytes().unwrap(), None), "unix:///s");

        let params = BootstrapParams {
            instance_id: "x".into(),
            namespace: "ns".into(),
            ..Default::default()
        };
        let bytes = answer(
            &args(),
            &params.write_to_bytes().unwrap(),
            "unix:///s",
            Some(3),
        );
        let result = BootstrapResult::parse_from_bytes(&bytes.unwrap()).unwrap();
        assert_eq!((result.version, result.address.as_str()), (3, "unix:///s"));
    }
}
