//! Usage of the node and its pods, for `/metrics/resource`, `/metrics/cadvisor`
//! and `/stats/summary`.
//!
//! Hosts report what they measure; this module joins the reports of all hosts
//! into one node, and the formats are pure functions of that.

pub(super) mod cadvisor;
mod counter;
pub(super) mod resource_metrics;
pub(super) mod summary;
pub(super) mod text;
mod usage;

pub(super) use self::counter::NodeCounter;
pub(super) use self::usage::{NodeUsage, join};
