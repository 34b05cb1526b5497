//! WebSocket channel sessions.

use bytes::Bytes;
use sandman_streaming::{Limits, Outcome, SessionError};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    sync::oneshot,
    time::{Instant, sleep},
};

use crate::{
    ALL, OUTPUT, SUCCESS,
    client::{Received, WebSocket, websocket_upgrade},
    quiet, seconds, serve,
};

const V4: &str = "v4.channel.k8s.io";
const V5: &str = "v5.channel.k8s.io";

#[tokio::test(start_paused = true)]
async fn status_is_last_and_once_then_close() {
    let (io, served) = serve(
        websocket_upgrade(V5),
        ALL,
        quiet(),
        1 << 20,
        async |streams| {
            streams.stderr.unwrap().write_all(b"err").await.unwrap();
            let mut stdout = streams.stdout.unwrap();
            stdout
                .write_chunk(Bytes::from(vec![b'x'; 200_000]))
                .await
                .unwrap();
            stdout.write_all(b"end").await.unwrap();
            Outcome::Exited(3)
        },
    );
    let mut client = WebSocket { io };
    assert_eq!(
        client.receive().await,
        Received::Binary(vec![1]),
        "greeting"
    );
    let mut stdout = 0;
    let status = loop {
        match client.receive().await {
            Received::Binary(message) if message[0] == 1 => {
                assert!(message.len() <= 64 * 1024 + 1);
                stdout += message.len() - 1;
            }
            Received::Binary(message) if message[0] == 2 => assert_eq!(message, b"\x02err"),
            Received::Binary(message) => break message,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(stdout, 200_003);
    assert!(String::from_utf8_lossy(&status).contains("ExitCode"));
    assert_eq!(client.receive().await, Received::Close(1000));
    // The server waits for the client's half of the close, and no longer.
    client.close().await;
    assert_eq!(client.receive().await, Received::End);
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn server_lingers_for_a_client_that_does_not_close() {
    let (io, served) = serve(
        websocket_upgrade(V4),
        OUTPUT,
        quiet(),
        1 << 16,
        async |_| Outcome::Exited(0),
    );
    let mut client = WebSocket { io };
    let begin = Instant::now();
    let (channels, code) = client.until_close().await;
    assert_eq!(
        (channels.last().unwrap(), code),
        (&(3, SUCCESS.to_vec()), 1000)
    );
    assert_eq!(client.receive().await, Received::End);
    assert_eq!(begin.elapsed().as_secs(), 10);
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn stdin_ends_by_signal_and_comes_as_text_too() {
    let (io, served) = serve(
        websocket_upgrade(V5),
        ALL,
        quiet(),
        1 << 16,
        async |streams| {
            let mut input = Vec::new();
            streams
                .stdin
                .unwrap()
                .read_to_end(&mut input)
                .await
                .unwrap();
            streams.stdout.unwrap().write_all(&input).await.unwrap();
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    client.binary(b"\0bytes, ").await;
    client.send(1, b"\0text").await;
    client.binary(b"\x07no such channel").await;
    client.binary(b"").await;
    client.binary(&[255, 0]).await;
    let (channels, _) = client.until_close().await;
    assert_eq!(
        channels,
        [(1, b"bytes, text".to_vec()), (3, SUCCESS.to_vec())]
    );
    drop(client);
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn base64_both_ways() {
    let upgrade = websocket_upgrade("v4.base64.channel.k8s.io");
    let (io, _served) = serve(upgrade, ALL, quiet(), 1 << 16, async |streams| {
        let mut input = [0; 5];
        streams.stdin.unwrap().read_exact(&mut input).await.unwrap();
        streams.stdout.unwrap().write_all(&input).await.unwrap();
        Outcome::Exited(0)
    });
    let mut client = WebSocket { io };
    client.send(1, b"0aGVsbG8=").await;
    assert_eq!(client.receive().await, Received::Text("1".to_owned()));
    assert_eq!(
        client.receive().await,
        Received::Text("1aGVsbG8=".to_owned())
    );
}

#[tokio::test(start_paused = true)]
async fn a_huge_message_streams_through_a_small_buffer() {
    const SIZE: usize = 48 << 20;
    let (io, served) = serve(
        websocket_upgrade(V5),
        ALL,
        quiet(),
        1 << 16,
        async |streams| {
            let mut stdin = streams.stdin.unwrap();
            let mut total = 0;
            while let Some(chunk) = stdin.read_chunk().await {
                assert!(
                    chunk.len() <= 512 * 1024,
                    "{} bytes were collected",
                    chunk.len()
                );
                total += chunk.len();
            }
            assert_eq!(total, SIZE);
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    client.binary(&vec![0; SIZE + 1]).await;
    client.binary(&[255, 0]).await;
    let (channels, _) = client.until_close().await;
    assert_eq!(channels.last().unwrap().1, SUCCESS);
    drop(client);
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn close_is_answered_when_the_process_is_done() {
    let (io, served) = serve(
        websocket_upgrade(V4),
        ALL,
        quiet(),
        1 << 16,
        async |streams| {
            let mut input = Vec::new();
            streams
                .stdin
                .unwrap()
                .read_to_end(&mut input)
                .await
                .unwrap();
            assert_eq!(input, b"all of it");
            sleep(seconds(1)).await;
            assert!(!streams.client_gone.is_cancelled());
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    client.binary(b"\0all of it").await;
    client.close().await;
    let begin = Instant::now();
    let (channels, code) = client.until_close().await;
    assert_eq!(begin.elapsed().as_secs(), 1);
    assert_eq!(
        (channels.last().unwrap().1.as_slice(), code),
        (SUCCESS, 1000)
    );
    served.result.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn close_is_answered_after_a_while_in_any_case() {
    let (io, served) = serve(
        websocket_upgrade(V4),
        ALL,
        quiet(),
        1 << 16,
        async |streams| {
            streams.client_gone.cancelled().await;
            let lost = streams
                .stdout
                .unwrap()
                .write_chunk(Bytes::from_static(b"late"))
                .await;
            // The answer to the Close is on its way while this runs, so either is right.
            let _ = lost;
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    client.close().await;
    let begin = Instant::now();
    let (channels, code) = client.until_close().await;
    assert_eq!(begin.elapsed().as_millis(), 2500);
    assert_eq!((channels, code), (vec![(1, Vec::new())], 1000));
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::ClientGone(None))
    ));
}

#[tokio::test(start_paused = true)]
async fn a_vanished_client_is_told_to_the_handler_after_its_input() {
    let (seen, told) = oneshot::channel();
    let (io, served) = serve(
        websocket_upgrade(V5),
        ALL,
        quiet(),
        1 << 16,
        async |streams| {
            let mut input = Vec::new();
            streams
                .stdin
                .unwrap()
                .read_to_end(&mut input)
                .await
                .unwrap();
            assert_eq!(input, b"last words");
            // Output of a process that still works on them does not fail meanwhile.
            let mut stdout = streams.stdout.unwrap();
            for _ in 0..100 {
                stdout
                    .write_chunk(Bytes::from_static(&[0; 65_536]))
                    .await
                    .unwrap();
            }
            streams.client_gone.cancelled().await;
            loop {
                if stdout
                    .write_chunk(Bytes::from_static(&[0; 65_536]))
                    .await
                    .is_err()
                {
                    break;
                }
            }
            seen.send(()).unwrap();
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    client.binary(b"\0last words").await;
    drop(client);
    told.await.unwrap();
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::ClientGone(_))
    ));
}

#[tokio::test(start_paused = true)]
async fn signs_of_life_while_the_process_reads_nothing() {
    let (io, _served) = serve(
        websocket_upgrade(V5),
        ALL,
        quiet(),
        1 << 22,
        async |streams| {
            let _stdin = streams.stdin;
            sleep(seconds(1000)).await;
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    assert_eq!(client.receive().await, Received::Binary(vec![1]));
    client.binary(&vec![0; 1 << 20]).await;
    client.ping().await;
    let begin = Instant::now();
    // The ping waits behind unread input: the server must speak unasked.
    for second in [10, 20, 30] {
        assert_eq!(client.receive().await, Received::Pong(Vec::new()));
        assert_eq!(begin.elapsed().as_secs(), second);
    }
}

#[tokio::test(start_paused = true)]
async fn pings_are_answered_and_sent() {
    let limits = Limits::default();
    let (io, _served) = serve(
        websocket_upgrade(V5),
        ALL,
        limits,
        1 << 16,
        async |streams| {
            streams.client_gone.cancelled().await;
            Outcome::Exited(0)
        },
    );
    let mut client = WebSocket { io };
    assert_eq!(client.receive().await, Received::Binary(vec![1]));
    client.ping().await;
    assert_eq!(client.receive().await, Received::Pong(b"hi".to_vec()));
    let begin = Instant::now();
    assert_eq!(client.receive().await, Received::Ping);
    assert_eq!(begin.elapsed().as_secs(), 25);
}

#[tokio::test(start_paused = true)]
async fn abnormal_ends_are_failures_with_a_message() {
    // Shutdown.
    let (io, served) = serve(
        websocket_upgrade(V5),
        OUTPUT,
        quiet(),
        1 << 16,
        async |_| std::future::pending().await,
    );
    served.shutdown.cancel();
    expect_failure(WebSocket { io }, "node agent is shutting down", 1000).await;
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::Shutdown)
    ));

    // A handler that panics.
    let (io, served) = serve(
        websocket_upgrade(V5),
        OUTPUT,
        quiet(),
        1 << 16,
        async |_| panic!("on purpose"),
    );
    expect_failure(WebSocket { io }, "session handler failed", 1000).await;
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::Handler(_))
    ));

    // Idleness, which pings do not interrupt.
    let limits = Limits {
        idle: Some(seconds(60)),
        ..Limits::default()
    };
    let (io, served) = serve(
        websocket_upgrade(V5),
        OUTPUT,
        limits,
        1 << 16,
        async |streams| {
            streams.client_gone.cancelled().await;
            Outcome::Exited(0)
        },
    );
    expect_failure(WebSocket { io }, "idle for 60 s", 1000).await;
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::Idle(_))
    ));

    // A client that breaks the protocol.
    let (mut io, served) = serve(
        websocket_upgrade(V5),
        OUTPUT,
        quiet(),
        1 << 16,
        async |streams| {
            streams.client_gone.cancelled().await;
            Outcome::Exited(0)
        },
    );
    io.write_all(b"GET / HTTP/1.1\r\n").await.unwrap();
    expect_failure(WebSocket { io }, "broke the protocol", 1002).await;
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::Protocol(_))
    ));
}

async fn expect_failure(mut client: WebSocket, message: &str, code: u16) {
    let (channels, closed) = client.until_close().await;
    let (channel, status) = channels.last().unwrap();
    let status = String::from_utf8_lossy(status);
    assert_eq!((*channel, closed), (3, code), "{status}");
    assert!(
        status.contains("Failure") && status.contains(message),
        "{status}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_stalled_client_holds_its_session_only_until_shutdown() {
    let (io, served) = serve(
        websocket_upgrade(V5),
        OUTPUT,
        quiet(),
        1024,
        async |streams| {
            streams
                .stdout
                .unwrap()
                .write_chunk(Bytes::from(vec![0; 1 << 20]))
                .await
                .unwrap();
            Outcome::Exited(0)
        },
    );
    sleep(seconds(600)).await;
    assert!(
        !served.result.is_finished(),
        "a slow client gets the time it needs"
    );
    served.shutdown.cancel();
    assert!(matches!(
        served.result.await.unwrap(),
        Err(SessionError::Shutdown)
    ));
    drop(io);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_session_aborts_its_handler() {
    let (dropped, gone) = oneshot::channel::<()>();
    let (io, served) = serve(
        websocket_upgrade(V5),
        OUTPUT,
        quiet(),
        1 << 16,
        async |_| {
            let _dropped = dropped;
            std::future::pending().await
        },
    );
    let mut client = WebSocket { io };
    assert_eq!(client.receive().await, Received::Binary(vec![1]));
    served.result.abort();
    assert!(gone.await.is_err(), "the handler's state is dropped");
    assert_eq!(client.receive().await, Received::End);
}

#[tokio::test(start_paused = true)]
async fn an_empty_message_ends_stdin_only_if_wanted() {
    for wanted in [false, true] {
        let limits = Limits {
            empty_message_ends_stdin: wanted,
            ..quiet()
        };
        let (io, _served) = serve(
            websocket_upgrade(V4),
            ALL,
            limits,
            1 << 16,
            async |streams| {
                let mut input = Vec::new();
                streams
                    .stdin
                    .unwrap()
                    .read_to_end(&mut input)
                    .await
                    .unwrap();
                streams.stdout.unwrap().write_all(&input).await.unwrap();
                Outcome::Exited(0)
            },
        );
        let mut client = WebSocket { io };
        client.binary(b"\0one").await;
        client.binary(b"\0").await;
        client.binary(b"\0two").await;
        client.close().await;
        let (channels, _) = client.until_close().await;
        let expected: &[u8] = if wanted { b"one" } else { b"onetwo" };
        assert_eq!(channels[0].1, expected);
    }
}
