//! Approves the serving certificates of known nodes. Kubernetes never approves these by itself,
//! since only the operator knows which addresses belong to a node.

mod decide;
mod nodes;
mod request;
mod run;

pub use self::{
    decide::{Decision, decide},
    nodes::{ExpectedNode, ExpectedNodes},
    run::{RunError, run},
};
