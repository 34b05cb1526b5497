//! `delete`: containerd has lost the shim of a container and wants it gone.
//!
//! A shim that answers is asked to do it. Without one, everything that the task's record names is
//! removed from here. containerd gives it a few seconds, so nothing here waits for long.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use containerd_shim_protos::api::{DeleteRequest, DeleteResponse, KillRequest, WaitRequest};
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::shim_async::{Client, TaskClient};
use containerd_shim_protos::ttrpc;
use containerd_shim_protos::ttrpc::context::with_duration;

use super::args::Args;
use super::group::Group;
use super::print;
use crate::task::convert::timestamp;
use crate::task::{Removed, check_id, remove_left};

/// For each request to a living shim.
const REQUEST: Duration = Duration::from_secs(2);
/// Before a lost connection is made again.
const AGAIN: Duration = Duration::from_millis(10);

pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    check_id("-id", &args.id)?;
    let bundle = match &args.bundle {
        Some(bundle) => bundle.clone(),
        None => std::env::current_dir().context("finding the bundle")?,
    };
    let group = Group::new(&args.state_dir, &args.namespace, &args.address);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the runtime")?;
    let response = runtime.block_on(delete(args, &group, bundle))?;
    print(&response.write_to_bytes()?)
}

async fn delete(args: &Args, group: &Group, bundle: PathBuf) -> anyhow::Result<DeleteResponse> {
    if let Some(response) = by_shim(args, group).await? {
        return Ok(response);
    }
    // A shim that starts meanwhile takes over what there is under this lock, or finds it gone.
    let lock = group.lock().context("taking the lock")?;
    if let Some(response) = by_shim(args, group).await? {
        return Ok(response);
    }
    let Removed { pid, exit } = remove_left(group.dir(), &args.id, &bundle).await?;
    drop(lock);
    group.settle(&args.id);
    Ok(DeleteResponse {
        pid: pid.cast_unsigned(),
        exit_status: exit.status,
        exited_at: MessageField::some(timestamp(exit.at)),
        ..Default::default()
    })
}

/// Has the shim delete it, if there is one that knows it.
async fn by_shim(args: &Args, group: &Group) -> anyhow::Result<Option<DeleteResponse>> {
    let address = format!("unix://{}", group.socket().display());
    let deadline = tokio::time::Instant::now() + REQUEST;
    loop {
        let Ok(client) = Client::connect(&address).await else {
            return Ok(None);
        };
        let late = tokio::time::Instant::now() > deadline;
        match ask(&TaskClient::new(client), &args.id).await {
            Ok(response) => {
                group.settle(&args.id);
                return Ok(Some(response));
            }
            // Half made and abandoned, or gone already: what is left has no task.
            Err(ttrpc::Error::RpcStatus(status)) if status.code() == ttrpc::Code::NOT_FOUND => {
                return Ok(None);
            }
            // It has the task and will not let go: removing it from here would be behind its back.
            Err(error @ ttrpc::Error::RpcStatus(_)) => bail!("the shim of {}: {error}", args.id),
            Err(error) if late => bail!("the shim of {}: {error}", args.id),
            // The connection is lost: who took it is ending, or was killed and comes again.
            Err(_) => tokio::time::sleep(AGAIN).await,
        }
    }
}

async fn ask(
    client: &TaskClient,
    id: &str,
) -> containerd_shim_protos::ttrpc::Result<DeleteResponse> {
    let kill = KillRequest {
        id: id.to_owned(),
        signal: 9,
        all: true,
        ..Default::default()
    };
    // Refused if it has ended, which is as well.
    drop(client.kill(with_duration(REQUEST), &kill).await);
    let wait = WaitRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    client.wait(with_duration(REQUEST), &wait).await?;
    let delete = DeleteRequest {
        id: id.to_owned(),
        ..Default::default()
    };
    client.delete(with_duration(REQUEST), &delete).await
}
