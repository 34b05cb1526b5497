//! Harness of the black-box tests. A test gets a namespace of its own on the
//! dev cluster, drives it with kubectl and the API like any user, waits by
//! watching with a deadline, and on failure leaves the events and component
//! logs that explain it.
//!
//! The cluster is found through the variables that `hack/dev env` prints.

mod cluster;
mod kubectl;
mod node_port;
mod pods;
mod scope;
mod wait;

pub use self::cluster::{Cluster, Component, variable};
pub use self::kubectl::{Kubectl, Output, Transport};
pub use self::node_port::{Answer, NodePort};
pub use self::pods::{PodBuilder, container, images};
pub use self::scope::Scope;
pub use self::wait::{
    DEADLINE, condition, container_state, is_phase, is_ready, wait_any_event, wait_event,
    wait_gone, wait_pod,
};
