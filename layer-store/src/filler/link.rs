//! The connection to the keeper, which is made again for as long as the filler lives.

use std::sync::Arc;
use std::time::Duration;

use super::Inner;
use crate::keeper::FillerLink;

const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// Takes questions in until the filler ends.
pub(super) fn run(inner: &Arc<Inner>) {
    let mut pause = FIRST_PAUSE;
    while !inner.is_closing() {
        let Ok(link) = FillerLink::connect(&inner.config.socket) else {
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
            continue;
        };
        pause = FIRST_PAUSE;
        let link = Arc::new(link);
        let connection = {
            let mut state = inner.lock();
            // The keeper asks anew whatever is open, under new names.
            state.plan.forget_questions();
            state.early.clear();
            state.link = Some(Arc::clone(&link));
            state.connection += 1;
            state.connection
        };
        if inner.is_closing() {
            return;
        }
        while let Ok(asked) = link.next() {
            inner.ask(connection, asked);
        }
    }
}
