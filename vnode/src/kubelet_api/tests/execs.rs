//! Exec from the client's handshake to the host's process and back.

use super::server::{As, Server};

const ADMIN: As<'_> = As::Token("token-admin");

#[tokio::test]
async fn output_and_exit_code_come_back() {
    let server = Server::start().await;
    for (code, status) in [(0, "Success"), (3, "Failure"), (137, "Failure")] {
        let query = format!("command=exit&command={code}&output=1&error=1");
        let exec = server.exec(ADMIN, &query).await.expect("a session");
        let output = exec.finish().await;
        assert_eq!(output.stderr, b"bye");
        assert_eq!(output.status["status"], status);
        if code != 0 {
            let cause = &output.status["details"]["causes"][0];
            assert_eq!(cause["reason"], "ExitCode");
            assert_eq!(cause["message"], code.to_string());
        }
    }
}

#[tokio::test]
async fn input_is_delivered_whole_and_then_ends() {
    let server = Server::start().await;
    let query = "command=cat&input=1&output=1";
    let mut exec = server.exec(ADMIN, query).await.expect("a session");
    let sent: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    // Larger than every buffer on the way: the echo is read only afterwards, so
    // the parts go out while nothing is taken in.
    exec.write(0, &sent[..100_000]).await;
    let finish = tokio::spawn(async move {
        for part in sent[100_000..].chunks(700_000) {
            exec.write(0, part).await;
        }
        exec.close_stdin().await;
        (sent, exec.finish().await)
    });
    let (sent, output) = finish.await.expect("the client ends");
    assert_eq!(output.status["status"], "Success");
    assert!(output.stdout == sent, "{} bytes", output.stdout.len());
}

#[tokio::test]
async fn much_output_arrives_whole() {
    let server = Server::start().await;
    let query = "command=flood&command=20000000&output=1";
    let exec = server.exec(ADMIN, query).await.expect("a session");
    let output = exec.finish().await;
    assert_eq!(output.stdout.len(), 20_000_000);
    assert_eq!(output.status["status"], "Success");
}

#[tokio::test]
async fn a_terminal_starts_with_the_clients_size() {
    let server = Server::start().await;
    let query = "command=size&input=1&output=1&tty=1";
    let mut exec = server.exec(ADMIN, query).await.expect("a session");
    exec.write(4, br#"{"Width":132,"Height":43}"#).await;
    assert_eq!(exec.finish().await.stdout, b"132x43");
    // A client that never says its size is not waited for long.
    let exec = server.exec(ADMIN, query).await.expect("a session");
    assert_eq!(exec.finish().await.stdout, b"0x0");
}

#[tokio::test]
async fn a_missing_executable_is_told_in_known_words() {
    let server = Server::start().await;
    let exec = server.exec(ADMIN, "command=missing&output=1").await;
    let status = exec.expect("a session").finish().await.status;
    assert_eq!(status["reason"], "InternalError");
    assert_eq!(status["code"], 500);
    let message = status["message"].as_str().expect("a message");
    for words in [
        "error executing command in container: ",
        "error finding executable",
        "executable file not found in $PATH",
    ] {
        assert!(message.contains(words), "{message}");
    }
}

#[tokio::test]
async fn a_lost_host_is_a_failure_and_not_silence() {
    let server = Server::start().await;
    let exec = server.exec(ADMIN, "command=die&output=1").await;
    let status = exec.expect("a session").finish().await.status;
    assert_eq!(status["status"], "Failure");
    let message = status["message"].as_str().expect("a message");
    assert!(message.contains("host fell over"), "{message}");
}

#[tokio::test]
async fn refusals_come_before_the_upgrade() {
    let server = Server::start().await;
    for (path, code, body) in [
        (
            "/exec/ns/pod/main?command=cat",
            400,
            "you must specify at least 1 of stdin, stdout, stderr",
        ),
        (
            "/exec/ns/pod/main?output=1",
            400,
            "query parameter \"command\" is required",
        ),
        (
            "/exec/ns/none/main?command=cat&output=1",
            404,
            "pod does not exist",
        ),
        (
            "/exec/ns/pod/late?command=cat&output=1",
            500,
            "container not found (\"late\")",
        ),
        (
            "/exec/ns/pod/uid-0/main?command=cat&output=1",
            500,
            "container not found (\"main\")",
        ),
        (
            "/attach/ns/pod/late?output=1",
            500,
            "container late not found in pod pod_ns",
        ),
        ("/attach/ns/none/main?output=1", 404, "pod does not exist"),
        ("/portForward/ns/none", 404, "pod does not exist"),
        ("/portForward/ns/pod/uid-0", 404, "pod not found"),
    ] {
        let (found, text) = server.get(ADMIN, path).await;
        assert_eq!(found, code, "{path}: {text}");
        assert!(text.starts_with(body), "{path}: {text}");
    }
    // No upgrade asked for.
    let path = "/exec/ns/pod/uid-1/main?command=cat&output=1";
    assert_eq!(server.get(ADMIN, path).await.0, 400);
    *server.hosts.client.lock().expect("not poisoned") = None;
    let refused = server.exec(ADMIN, "command=cat&output=1").await.err();
    assert_eq!(refused, Some((503, "host host-0 cannot be reached".into())));
}

#[tokio::test]
async fn attach_joins_the_containers_own_process() {
    let server = Server::start().await;
    let path = "/attach/ns/pod/main?input=1&output=1&command=ignored";
    let attach = server.websocket(ADMIN, path, "v5.channel.k8s.io").await;
    let mut attach = attach.expect("a session");
    attach.write(0, b"hello").await;
    attach.close_stdin().await;
    let output = attach.finish().await;
    assert_eq!(output.stdout, b"hello");
    assert_eq!(output.status["status"], "Success");
}

#[tokio::test]
async fn run_answers_with_the_output() {
    let server = Server::start().await;
    for (query, code, body) in [
        ("cmd=size", 200, "0x0"),
        ("cmd=exit%200", 200, "bye"),
        ("cmd=exit+3", 500, "command 'exit 3' exited with 3: bye"),
        ("", 400, "query parameter \"cmd\" is required"),
        (
            "cmd=missing",
            500,
            r#"error finding executable: exec: "missing": executable file not found in $PATH"#,
        ),
        ("cmd=die", 500, "the host failed: host fell over"),
    ] {
        let path = format!("/run/ns/pod/main?{query}");
        let answer = server.send(ADMIN, http::Method::POST, &path).await;
        assert_eq!(answer, (code, body.into()), "{query}");
    }
    let path = "/run/ns/pod/uid-0/main?cmd=size";
    let answer = server.send(ADMIN, http::Method::POST, path).await;
    assert_eq!(answer, (500, "container not found (\"main\")".into()));
}
