//! SPDY sessions.

use sandman_streaming::{Outcome, SessionError, StreamOptions, TerminalSize};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    time::{Instant, sleep, timeout},
};

use crate::{
    ALL, OUTPUT,
    client::{Spdy, spdy_upgrade},
    quiet, seconds, serve,
};

#[tokio::test(start_paused = true)]
async fn silent_until_the_client_speaks_then_each_stream_is_answered_at_once() {
    let (io, served) = serve(spdy_upgrade(), ALL, quiet(), 1 << 16, async |streams| {
        let mut input = Vec::new();
        streams
            .stdin
            .unwrap()
            .read_to_end(&mut input)
            .await
            .unwrap();
        streams.stdout.unwrap().write_all(&input).await.unwrap();
        streams.stderr.unwrap().write_all(b"err").await.unwrap();
        Outcome::Exited(0)
    });
    let mut client = Spdy::new(io);
    assert!(
        timeout(seconds(20), client.receive()).await.is_err(),
        "silence"
    );
    for (stream, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr")] {
        client.open(stream, kind).await;
        assert_eq!(client.receive().await.unwrap(), format!("reply {stream}"));
    }
    client.control(6, &1u32.to_be_bytes()).await;
    assert_eq!(client.receive().await.unwrap(), "ping 1");
    client.data(3, false, b"in").await;
    client.data(3, true, b"put").await;
    let mut frames = Vec::new();
    while frames
        .last()
        .is_none_or(|last: &String| !last.contains("status"))
    {
        frames.push(client.receive().await.unwrap());
    }
    assert_eq!(
        frames,
        [
            "data+fin 5 input",
            "data+fin 7 err",
            "fin 3",
            r#"data+fin 1 {"status":"Success"}"#
        ]
    );
    // No GOAWAY: the connection stays open until the client has read and closed.
    let (_, mut write_half) = tokio::io::split(client.io);
    write_half.shutdown().await.unwrap();
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn missing_streams_are_a_failure_after_half_a_minute() {
    let (io, served) = serve(
        spdy_upgrade(),
        ALL,
        quiet(),
        1 << 16,
        async |_| unreachable!(),
    );
    let mut client = Spdy::new(io);
    let begin = Instant::now();
    client.open(1, "error").await;
    client.open(3, "stdin").await;
    let frames = client.rest().await;
    assert_eq!(
        begin.elapsed().as_secs(),
        40,
        "30 s for the streams, 10 s for the client"
    );
    assert_eq!(frames[..3], ["reply 1", "reply 3", "fin 3"]);
    assert!(
        frames[3].starts_with("data+fin 1 ") && frames[3].contains("timed out"),
        "{frames:?}"
    );
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::StreamCreation(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn resize_is_optional_and_may_come_late() {
    let options = StreamOptions {
        stdin: false,
        stdout: true,
        stderr: false,
        tty: true,
    };
    let (io, _served) = serve(
        spdy_upgrade(),
        options,
        quiet(),
        1 << 16,
        async |mut streams| {
            let mut stdout = streams.stdout.unwrap();
            stdout.write_all(b"started").await.unwrap();
            let TerminalSize { width, height } = streams.resize.next().await.unwrap();
            stdout
                .write_all(format!("{width}x{height}").as_bytes())
                .await
                .unwrap();
            Outcome::Exited(0)
        },
    );
    let mut client = Spdy::new(io);
    client.open(1, "error").await;
    client.open(3, "stdout").await;
    for expected in ["reply 1", "reply 3", "data 3 started"] {
        assert_eq!(client.receive().await.unwrap(), expected);
    }
    client.open(5, "resize").await;
    assert_eq!(client.receive().await.unwrap(), "reply 5");
    client.data(5, false, br#"{"Width":80,"#).await;
    client.data(5, false, br#""Height":24}"#).await;
    assert_eq!(client.receive().await.unwrap(), "data+fin 3 80x24");
}

#[tokio::test(start_paused = true)]
async fn streams_are_answered_even_after_the_command_is_over() {
    let options = StreamOptions {
        stdin: false,
        stdout: true,
        stderr: false,
        tty: true,
    };
    let (io, served) = serve(spdy_upgrade(), options, quiet(), 1 << 16, async |_| {
        Outcome::Exited(0)
    });
    let mut client = Spdy::new(io);
    client.open(1, "error").await;
    client.open(3, "stdout").await;
    for expected in [
        "reply 1",
        "reply 3",
        "fin 3",
        r#"data+fin 1 {"status":"Success"}"#,
    ] {
        assert_eq!(client.receive().await.unwrap(), expected);
    }
    client.open(5, "resize").await;
    assert_eq!(client.receive().await.unwrap(), "reply 5");
    drop(client);
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn streams_out_of_order_or_twice_are_reset_alone() {
    let (io, _served) = serve(spdy_upgrade(), ALL, quiet(), 1 << 16, async |streams| {
        streams.stdout.unwrap().write_all(b"ok").await.unwrap();
        Outcome::Exited(0)
    });
    let mut client = Spdy::new(io);
    for (stream, kind, answer) in [
        (3, "error", "reply 3"),
        (1, "stdin", "reset 1 1"),
        (4, "stdin", "reset 4 1"),
        (5, "error", "reset 5 1"),
        (7, "something new", "reply 7"),
        (9, "stdin", "reply 9"),
        (11, "stdout", "reply 11"),
        (13, "stderr", "reply 13"),
    ] {
        client.open(stream, kind).await;
        assert_eq!(client.receive().await.unwrap(), answer);
    }
    assert_eq!(client.receive().await.unwrap(), "data+fin 11 ok");
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_while_opening_ends_the_session() {
    let (io, served) = serve(
        spdy_upgrade(),
        ALL,
        quiet(),
        1 << 16,
        async |_| unreachable!(),
    );
    let mut client = Spdy::new(io);
    client.open(1, "error").await;
    drop(client);
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::ClientGone(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn a_killed_client_is_noticed_while_the_process_reads_nothing() {
    let (io, served) = serve(spdy_upgrade(), ALL, quiet(), 1 << 16, async |streams| {
        let _stdin = streams.stdin;
        streams.client_gone.cancelled().await;
        Outcome::Exited(0)
    });
    let mut client = Spdy::new(io);
    for (stream, kind) in [(1, "error"), (3, "stdin"), (5, "stdout"), (7, "stderr")] {
        client.open(stream, kind).await;
        client.receive().await.unwrap();
    }
    // More than the session buffers: from here on it does not read.
    let flood = async {
        loop {
            client.data(3, false, &[0; 65_536]).await;
        }
    };
    assert!(timeout(seconds(1), flood).await.is_err());
    sleep(seconds(1)).await;
    drop(client);
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::ClientGone(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn made_up_streams_are_bounded() {
    let (io, served) = serve(
        spdy_upgrade(),
        OUTPUT,
        quiet(),
        1 << 16,
        async |_| unreachable!(),
    );
    let mut client = Spdy::new(io);
    for stream in 0..17 {
        client.open(2 * stream + 1, "x").await;
    }
    client.rest().await;
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::Protocol(_))
    ));
}
