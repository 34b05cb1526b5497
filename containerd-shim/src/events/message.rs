//! The events of the task service.

use containerd_shim_protos::events::task;
use containerd_shim_protos::protobuf::{Message, MessageField};
use containerd_shim_protos::{api, topics};

use crate::stdio::Names;
use crate::task::convert::timestamp;
use crate::task::processes::Exit;

/// Something that happened to the task `id`.
pub(crate) struct Event<'a> {
    pub(crate) id: &'a str,
    pub(crate) what: What<'a>,
}

/// What happened. In an exit, an empty exec id means the task's first process.
pub(crate) enum What<'a> {
    Created {
        bundle: &'a str,
        rootfs: &'a [api::Mount],
        stdio: &'a Names,
        pid: u32,
    },
    Started {
        pid: u32,
    },
    ExecAdded {
        exec: &'a str,
    },
    ExecStarted {
        exec: &'a str,
        pid: u32,
    },
    Exited {
        exec: &'a str,
        pid: u32,
        exit: Exit,
    },
    Deleted {
        pid: u32,
        exit: Exit,
    },
    OutOfMemory,
    Paused,
    Resumed,
}

impl Event<'_> {
    /// Topic, type and content.
    pub(super) fn encode(&self) -> (&'static str, String, Vec<u8>) {
        let container_id = self.id.to_owned();
        match self.what {
            What::Created {
                bundle,
                rootfs,
                stdio,
                pid,
            } => {
                let io = task::TaskIO {
                    stdin: stdio.stdin.clone(),
                    stdout: stdio.stdout.clone(),
                    stderr: stdio.stderr.clone(),
                    terminal: stdio.terminal,
                    ..Default::default()
                };
                let event = task::TaskCreate {
                    container_id,
                    bundle: bundle.to_owned(),
                    rootfs: rootfs.to_vec(),
                    io: MessageField::some(io),
                    pid,
                    ..Default::default()
                };
                encode(topics::TASK_CREATE_EVENT_TOPIC, &event)
            }
            What::Started { pid } => {
                let event = task::TaskStart {
                    container_id,
                    pid,
                    ..Default::default()
                };
                encode(topics::TASK_START_EVENT_TOPIC, &event)
            }
            What::ExecAdded { exec } => {
                let event = task::TaskExecAdded {
                    container_id,
                    exec_id: exec.to_owned(),
                    ..Default::default()
                };
                encode(topics::TASK_EXEC_ADDED_EVENT_TOPIC, &event)
            }
            What::ExecStarted { exec, pid } => {
                let event = task::TaskExecStarted {
                    container_id,
                    exec_id: exec.to_owned(),
                    pid,
                    ..Default::default()
                };
                encode(topics::TASK_EXEC_STARTED_EVENT_TOPIC, &event)
            }
            What::Exited { exec, pid, exit } => {
                // The first process goes by the container's id, as with containerd's own shim: its
                // clients tell execs apart by it.
                let id = if exec.is_empty() { self.id } else { exec };
                let event = task::TaskExit {
                    container_id,
                    id: id.to_owned(),
                    pid,
                    exit_status: exit.status,
                    exited_at: MessageField::some(timestamp(exit.at)),
                    ..Default::default()
                };
                encode(topics::TASK_EXIT_EVENT_TOPIC, &event)
            }
            What::Deleted { pid, exit } => {
                let event = task::TaskDelete {
                    container_id,
                    pid,
                    exit_status: exit.status,
                    exited_at: MessageField::some(timestamp(exit.at)),
                    ..Default::default()
                };
                encode(topics::TASK_DELETE_EVENT_TOPIC, &event)
            }
            What::OutOfMemory => {
                let event = task::TaskOOM {
                    container_id,
                    ..Default::default()
                };
                encode(topics::TASK_OOM_EVENT_TOPIC, &event)
            }
            What::Paused => {
                let event = task::TaskPaused {
                    container_id,
                    ..Default::default()
                };
                encode(topics::TASK_PAUSED_EVENT_TOPIC, &event)
            }
            What::Resumed => {
                let event = task::TaskResumed {
                    container_id,
                    ..Default::default()
                };
                encode(topics::TASK_RESUMED_EVENT_TOPIC, &event)
            }
        }
    }
}

fn encode<M: Message + containerd_shim_protos::protobuf::MessageFull>(
    topic: &'static str,
    event: &M,
) -> (&'static str, String, Vec<u8>) {
    let type_url = M::descriptor().full_name().to_owned();
    // Writing to memory cannot fail.
    (topic, type_url, event.write_to_bytes().unwrap_or_default())
}
