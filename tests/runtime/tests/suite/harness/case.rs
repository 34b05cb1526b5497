//! What is run.

use std::future::Future;
use std::pin::Pin;

use serde_json::Value;

use super::{Session, base};

/// What was seen, for comparison.
pub(crate) type Lines = Vec<String>;

type Body = Box<dyn Fn(Session) -> Pin<Box<dyn Future<Output = Lines> + Send>>>;

/// One comparison.
pub(crate) struct Case {
    /// Unique; runs alone with `SANDMAN_CASE=name`.
    pub(crate) name: &'static str,
    /// Parts of what runc shows, so that a case cannot pass by failing on both.
    pub(crate) must: Vec<&'static str>,
    /// Why the two may differ.
    pub(crate) differs: Option<&'static str>,
    pub(crate) body: Body,
}

impl Case {
    /// Both runtimes must show `text`.
    pub(crate) fn must(mut self, text: &'static str) -> Self {
        self.must.push(text);
        self
    }

    /// The two may differ because of `reason`, but for what they must show.
    pub(crate) fn differs(mut self, reason: &'static str) -> Self {
        self.differs = Some(reason);
        self
    }
}

/// A container that runs `script` in a shell to its end: its output, exit and events.
pub(crate) fn run(name: &'static str, script: &'static str, edit: fn(&mut Value)) -> Case {
    scenario(name, move |session| async move {
        let mut spec = base(&session, &["/bin/sh", "-c", script]);
        edit(&mut spec);
        session.run_to_end(spec).await
    })
}

/// Anything else.
pub(crate) fn scenario<F: Future<Output = Lines> + Send + 'static>(
    name: &'static str,
    body: impl Fn(Session) -> F + 'static,
) -> Case {
    Case {
        name,
        must: Vec::new(),
        differs: None,
        body: Box::new(move |session| Box::pin(body(session))),
    }
}
