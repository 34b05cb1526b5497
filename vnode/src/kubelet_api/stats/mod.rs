//! Usage of the node and its pods, for `/metrics/resource` and `/stats/summary`.
//!
//! Hosts report what they measure; this module joins the reports of all hosts
//! into one node, and the two formats are pure functions of that.

mod counter;
pub(super) mod resource_metrics;
pub(super) mod summary;
mod usage;

pub(super) use self::counter::NodeCounter;
pub(super) use self::usage::{NodeUsage, join};
