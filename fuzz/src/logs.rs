//! Queries of `/containerLogs`.

use sandman_vnode::kubelet_api::check_log_query;

use crate::way;

pub(crate) const WORDS: &[&[u8]] = &[
    b"follow=true",
    b"previous=1",
    b"timestamps=t",
    b"tailLines=10",
    b"tail=all",
    b"limitBytes=1",
    b"sinceSeconds=60",
    b"sinceTime=2026-01-02T03:04:05Z",
    b"sinceTime=null",
    b"stream=Stdout",
    b"stream=All",
    b"&",
    b"%00",
    b"%ff",
    b"-1",
    b"9223372036854775807",
    b"18446744073709551616",
    b"9999-12-31T23:59:59.999999999Z",
    b"-009999-01-01T00:00:00Z",
];

pub(crate) fn run(input: &[u8]) -> u64 {
    let query = String::from_utf8_lossy(input);
    let answer = check_log_query(&query);
    // A refusal is the client's fault and says so.
    if let Err(code) = answer {
        assert!(
            (400..500).contains(&code),
            "{query:?} is answered with {code}"
        );
    }
    way(&(
        answer,
        query.matches('&').count().min(4),
        query.contains('%'),
    ))
}
