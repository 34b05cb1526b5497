//! Sandboxes: what is wanted of each, what has happened, and the one task that brings both
//! together.

mod adopt;
pub mod backoff;
pub mod board;
pub mod facts;
pub mod identity;
pub mod jobs;
pub mod live;
pub mod manager;
pub mod oom;
pub mod plan;
pub mod probe;
pub mod queue;
pub mod report;
pub mod resize;
mod room;
pub mod store;
pub mod validate;
pub mod view;
mod worker;

pub use self::jobs::Host;
pub use self::manager::{Sandboxes, WishError};
