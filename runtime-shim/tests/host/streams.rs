//! Clients that attach to a container's own process, and connections into its network namespace.

use std::time::Duration;

use bytes::Bytes;
use sandman_protocol::v1;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use v1::exec_request::Message as In;
use v1::exec_response::Message as Out;
use v1::port_forward_request::Message as ForwardIn;
use v1::port_forward_response::Message as ForwardOut;

use crate::support::client::{Node, RunningExec};
use crate::support::on_a_host;

const DEADLINE: Duration = Duration::from_secs(60);

fn start(uid: &str) -> v1::ExecStart {
    v1::ExecStart {
        uid: uid.into(),
        container: "main".into(),
        stdin: true,
        stdout: true,
        stderr: true,
        ..Default::default()
    }
}

async fn attach(node: &Node, start: v1::ExecStart) -> RunningExec {
    let (input, requests) = mpsc::channel(4);
    let message = Some(In::Start(start));
    input.send(v1::ExecRequest { message }).await.unwrap();
    let mut client = node.client.clone();
    let output = client.attach(ReceiverStream::new(requests)).await;
    RunningExec {
        input,
        output: output.unwrap().into_inner(),
    }
}

async fn say(client: &RunningExec, message: In) {
    let message = Some(message);
    client
        .input
        .send(v1::ExecRequest { message })
        .await
        .unwrap();
}

async fn say_text(client: &RunningExec, text: &'static str) {
    say(client, In::Stdin(Bytes::from_static(text.as_bytes()))).await;
}

/// Reads stdout until it has `text`.
async fn until(client: &mut RunningExec, text: &str) {
    let mut seen = String::new();
    let reading = async {
        while !seen.contains(text) {
            match client.output.message().await.unwrap().unwrap().message {
                Some(Out::Stdout(data)) => seen.push_str(&String::from_utf8_lossy(&data)),
                Some(Out::Started(_)) => {}
                other => panic!("{other:?} instead of {text:?} after {seen:?}"),
            }
        }
    };
    if timeout(DEADLINE, reading).await.is_err() {
        panic!("no {text:?}, only {seen:?}");
    }
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn a_shell_waits_for_clients_and_survives_them() {
    on_a_host(|mut host| async move {
        let node = host.node().await;
        let mut spec = node.pod("shell", "exec sh");
        spec.containers[0].stdin = true;
        spec.containers[0].tty = true;
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;

        let size = v1::TerminalSize {
            width: 99,
            height: 33,
        };
        let mut first = attach(
            &node,
            v1::ExecStart {
                size: Some(size),
                ..start(&spec.uid)
            },
        )
        .await;
        say_text(&first, "name=kept; stty size\n").await;
        until(&mut first, "33 99").await;
        // The end of one client's input is the end of its session.
        say(&first, In::CloseStdin(v1::CloseStdin {})).await;
        assert_eq!(first.collect().await.code, Some(0));

        // Neither did the container notice, nor does it notice our own restart.
        host.kill_shim();
        host.start_shim();
        let node = host.node().await;
        node.wait_running(&spec.uid).await;
        let mut second = attach(&node, start(&spec.uid)).await;
        let mut third = attach(&node, start(&spec.uid)).await;
        say_text(&second, "echo still $name\n").await;
        until(&mut second, "still kept").await;
        until(&mut third, "still kept").await;
        say_text(&second, "exit 5\n").await;
        for client in [&mut second, &mut third] {
            assert_eq!(client.collect().await.code, Some(0));
        }
        node.wait_finished(&spec.uid).await;
        let late = attach(&node, start(&spec.uid)).await.collect().await;
        let kind = late.failed.unwrap().kind();
        assert_eq!(kind, v1::exec_failed::Kind::ContainerNotRunning);
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn input_that_is_given_once_ends() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let mut spec = node.pod("once", "cat; echo over; echo sorry >&2; exit 4");
        spec.containers[0].stdin = true;
        spec.containers[0].stdin_once = true;
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        let mut client = attach(&node, start(&spec.uid)).await;
        say_text(&client, "last words\n").await;
        say(&client, In::CloseStdin(v1::CloseStdin {})).await;
        let output = client.collect().await;
        assert_eq!(output.text(), "last words\nover\n");
        assert_eq!(output.stderr, b"sorry\n");
        assert_eq!(output.code, Some(0));
        node.wait_finished(&spec.uid).await;
        node.remove_and_wait(&spec.uid).await;

        // The client leaves without a word: that is the end of the input as well.
        let again = uuid::Uuid::new_v4().to_string();
        spec.uid = again;
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        let mut client = attach(&node, start(&spec.uid)).await;
        say_text(&client, "hello\n").await;
        until(&mut client, "hello\n").await;
        drop(client);
        node.wait_finished(&spec.uid).await;
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}

/// A forwarded connection.
struct Forward {
    input: mpsc::Sender<v1::PortForwardRequest>,
    output: tonic::Streaming<v1::PortForwardResponse>,
}

async fn forward(node: &Node, uid: &str, port: u32) -> Forward {
    let (input, requests) = mpsc::channel(4);
    let start = v1::PortForwardStart {
        uid: uid.into(),
        port,
    };
    let message = Some(ForwardIn::Start(start));
    input
        .send(v1::PortForwardRequest { message })
        .await
        .unwrap();
    let mut client = node.client.clone();
    let output = client.port_forward(ReceiverStream::new(requests)).await;
    Forward {
        input,
        output: output.unwrap().into_inner(),
    }
}

impl Forward {
    async fn next(&mut self) -> Option<ForwardOut> {
        let next = timeout(DEADLINE, self.output.message()).await.unwrap();
        next.unwrap().map(|response| response.message.unwrap())
    }
}

#[test]
#[ignore = "needs root, containerd, runc and the built agent"]
fn connections_reach_the_pods_own_loopback() {
    on_a_host(|host| async move {
        let node = host.node().await;
        let server = "while true; do echo answer | nc -l -p 7001; done";
        let spec = node.pod("serve", server);
        node.apply(&spec).await;
        node.wait_running(&spec.uid).await;
        // Running is not listening: the first tries may be too early.
        let mut opened = None;
        for _ in 0..500 {
            let mut forward = forward(&node, &spec.uid, 7001).await;
            match forward.next().await.unwrap() {
                ForwardOut::Opened(_) => {
                    opened = Some(forward);
                    break;
                }
                ForwardOut::Failed(failed) => {
                    assert!(failed.message.contains("connection refused"), "{failed:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        let mut forward_one = opened.expect("the server listens at last");
        assert_eq!(
            forward_one.next().await,
            Some(ForwardOut::Data("answer\n".into()))
        );
        let message = Some(ForwardIn::Data(Bytes::from_static(b"question\n")));
        let question = v1::PortForwardRequest { message };
        forward_one.input.send(question).await.unwrap();
        // A half close: the end of the whole stream would take the question with it.
        drop(forward_one.input);
        // The server got it, and the end.
        let output = async {
            loop {
                let log = v1::LogsRequest {
                    uid: spec.uid.clone(),
                    container: "main".into(),
                    ..Default::default()
                };
                if node.logs(log).await.unwrap().contains("question") {
                    return;
                }
            }
        };
        timeout(DEADLINE, output).await.unwrap();

        for (uid, port, text) in [
            (
                spec.uid.as_str(),
                7999,
                "dial tcp4 127.0.0.1:7999: connect: connection refused",
            ),
            (spec.uid.as_str(), 0, "not a port"),
            (spec.uid.as_str(), 70_000, "not a port"),
            ("no-such-uid", 80, "the sandbox is not running"),
            ("../../etc", 80, "uid"),
        ] {
            let mut refused = forward(&node, uid, port).await;
            match refused.next().await {
                Some(ForwardOut::Failed(failed)) => {
                    assert!(failed.message.contains(text), "{failed:?}");
                }
                other => panic!("{uid} {port}: {other:?}"),
            }
            assert_eq!(refused.next().await, None);
        }
        node.remove_and_wait(&spec.uid).await;
        assert_eq!(host.leftovers(), Vec::<String>::new());
    });
}
