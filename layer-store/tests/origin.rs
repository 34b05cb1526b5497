//! Sources against a registry that misbehaves.
#![allow(clippy::unwrap_used)]

mod registry;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use registry::{Fault as Trouble, Registry, Tokens, client};
use sandman_layer_store::origin::{
    Anonymous, Authorize, Fault, Fetched, Origin, OriginError, Patience, Source,
};

const SIZE: usize = 10_000;

fn blob() -> Vec<u8> {
    (0..SIZE).map(|n| u8::try_from(n % 251).unwrap()).collect()
}

async fn start() -> (Registry, Source) {
    with(Arc::new(Anonymous)).await
}

async fn with(authorize: Arc<dyn Authorize>) -> (Registry, Source) {
    let registry = Registry::start(blob()).await;
    let patience = Patience {
        answer: Duration::from_millis(300),
        silence: Duration::from_millis(300),
    };
    let url = registry.blob_url();
    let source = Source::new(client(), url, SIZE as u64, authorize, patience);
    (registry, source)
}

fn tokens(tokens: &[&'static str]) -> Arc<Tokens> {
    Arc::new(Tokens(Mutex::new(tokens.iter().copied().collect())))
}

async fn read(source: &Source) -> Result<Vec<u8>, OriginError> {
    match source.read(100..300).await? {
        Fetched::Range(bytes) => {
            assert_eq!(bytes, blob()[100..300]);
            Ok(bytes)
        }
        Fetched::Whole(_) => panic!("asked for a range"),
    }
}

#[tokio::test]
async fn ranges_are_read_and_counted() {
    let (_registry, source) = start().await;
    read(&source).await.unwrap();
    assert_eq!(
        (source.counters().bytes(), source.counters().requests()),
        (200, 1)
    );
}

#[tokio::test]
async fn tokens_are_renewed_on_401_and_403() {
    for status in [401, 403] {
        let (registry, source) = with(tokens(&["old", "new"])).await;
        registry.with(|state| state.token = Some(("new".to_owned(), status)));
        read(&source).await.unwrap();
        read(&source).await.unwrap();
        assert_eq!(source.counters().requests(), 3, "renewed once");
        // Hours later the token is too old again.
        registry.with(|state| state.token = Some(("newest".to_owned(), status)));
        let error = read(&source).await.unwrap_err();
        assert!(
            error.to_string().contains("the token service refuses"),
            "{error}"
        );
        assert_eq!(source.counters().faults(Fault::Denied), 1);
    }
}

#[tokio::test]
async fn a_new_token_that_is_refused_too_ends_it() {
    let (registry, source) = with(tokens(&["a", "b", "c"])).await;
    registry.with(|state| state.token = Some(("other".to_owned(), 401)));
    assert!(matches!(
        read(&source).await,
        Err(OriginError::Denied { .. })
    ));
    assert_eq!(registry.seen().len(), 2);
}

#[tokio::test]
async fn redirects_are_remembered_until_they_expire() {
    let (registry, source) = with(tokens(&["secret"])).await;
    registry.with(|state| state.redirects = true);
    read(&source).await.unwrap();
    read(&source).await.unwrap();
    let paths = |registry: &Registry| {
        let seen = registry.seen();
        seen.into_iter().map(|seen| seen.path).collect::<Vec<_>>()
    };
    assert_eq!(
        paths(&registry),
        ["/v2/a/blobs/x", "/signed/0", "/signed/0"]
    );
    registry.with(|state| state.signature = 1);
    read(&source).await.unwrap();
    assert_eq!(
        paths(&registry)[3..],
        ["/signed/0", "/v2/a/blobs/x", "/signed/1"]
    );
    // The credential went to the registry alone.
    for seen in registry.seen() {
        assert_eq!(
            seen.authorization.is_some(),
            seen.path.starts_with("/v2/"),
            "{seen:?}"
        );
    }
}

#[tokio::test]
async fn redirects_in_a_circle_end() {
    let (registry, source) = start().await;
    registry.with(|state| {
        state.redirects = true;
        state.always = Some(Trouble::Status(403));
    });
    assert!(matches!(
        read(&source).await,
        Err(OriginError::Wrong { .. })
    ));
    assert!(registry.seen().len() < 20);
}

#[tokio::test]
async fn a_source_without_ranges_is_a_stream() {
    let (registry, source) = start().await;
    registry.with(|state| state.faults.push_back(Trouble::IgnoreRange));
    let Fetched::Whole(mut whole) = source.read(100..300).await.unwrap() else {
        panic!("a range came");
    };
    let mut bytes = Vec::new();
    while let Some(part) = source.next(&mut whole).await.unwrap() {
        bytes.extend_from_slice(&part);
    }
    assert_eq!(bytes, blob());
}

#[tokio::test]
async fn faults_are_told_apart_and_pass() {
    for (trouble, fault) in [
        (Trouble::Truncate, Fault::Unreachable),
        (Trouble::Short, Fault::Wrong),
        (Trouble::WrongContentRange, Fault::Wrong),
        (Trouble::Status(500), Fault::Wrong),
        (Trouble::Status(416), Fault::Wrong),
        (Trouble::Status(404), Fault::Missing),
        (Trouble::Status(503), Fault::Busy),
        (Trouble::RetryAfter(1), Fault::Busy),
        (Trouble::Hang, Fault::Slow),
        (Trouble::HangInBody, Fault::Slow),
    ] {
        let (registry, source) = start().await;
        registry.with(|state| state.faults.push_back(trouble));
        let error = read(&source).await.unwrap_err();
        assert_eq!(error.fault(), fault, "{trouble:?}: {error}");
        assert!(error.to_string().contains("127.0.0.1:"), "{error}");
        assert_eq!(source.counters().faults(fault), 1, "{trouble:?}");
        read(&source).await.unwrap();
    }
}

#[tokio::test]
async fn a_source_that_failed_rests_and_others_are_asked() {
    let (registry, first) = start().await;
    let (_other, second) = start().await;
    let origin = Origin::new(vec![Arc::new(first), Arc::new(second)]);
    let names = |origin: &Origin| {
        let ready = origin.ready(Instant::now());
        ready.iter().map(|source| source.name()).collect::<Vec<_>>()
    };
    let both = names(&origin);
    assert_eq!(both.len(), 2);
    registry.with(|state| state.faults.push_back(Trouble::RetryAfter(60)));
    read(&origin.sources()[0]).await.unwrap_err();
    assert_eq!(names(&origin), both[1..]);
    assert!(origin.next_ready(Instant::now()).unwrap() > Instant::now());
    origin.sources()[1].was_corrupt();
    assert!(names(&origin).is_empty());
    assert_eq!(origin.sources()[1].counters().faults(Fault::Corrupt), 1);
}

#[tokio::test]
async fn nobody_there_is_an_error_that_names_the_host() {
    let (registry, source) = start().await;
    let address = registry.address.to_string();
    drop(registry);
    // The listener ends with its task.
    let error = loop {
        match read(&source).await {
            Ok(_) => tokio::task::yield_now().await,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains(&address), "{error}");
    assert_eq!(error.fault(), Fault::Unreachable);
}
