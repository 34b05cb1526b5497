//! The whole way: FIFO, log file, reader.

use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::time::Duration;

use futures::StreamExt as _;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

struct Fixture {
    folder: tempfile::TempDir,
    store: LogStore,
    id: LogId,
}

impl Fixture {
    fn new(max_bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = LogStore::new(
            folder.path(),
            LogLimits {
                max_bytes,
                max_files: 5,
            },
        )
        .unwrap();
        let id = LogId {
            uid: "uid".to_owned(),
            container: "main".to_owned(),
            attempt: 0,
        };
        Self { folder, store, id }
    }

    fn fifo(&self, name: &str) -> PathBuf {
        let path = self.folder.path().join(name);
        mkfifo(&path, Mode::S_IRWXU).unwrap();
        path
    }

    /// A started copy and the writing end of its stdout.
    fn start(&self) -> (ContainerLog, File) {
        let fifo = self.fifo("stdout");
        let log = self.store.start(&self.id, &fifo, None).unwrap();
        (log, OpenOptions::new().write(true).open(&fifo).unwrap())
    }

    async fn read(&self, request: v1::LogsRequest) -> String {
        let (_running, stopped) = watch::channel(false);
        collect(self.store.read(&self.id, &request, stopped)).await
    }
}

async fn collect(stream: BoxStream<'static, io::Result<Bytes>>) -> String {
    let all = stream.map(Result::unwrap).collect::<Vec<_>>();
    let all = tokio::time::timeout(DEADLINE, all).await.unwrap();
    String::from_utf8(all.concat()).unwrap()
}

#[tokio::test]
async fn output_of_both_streams_is_kept() {
    let fixture = Fixture::new(1 << 20);
    let (stdout, stderr) = (fixture.fifo("stdout"), fixture.fifo("stderr"));
    let log = fixture
        .store
        .start(&fixture.id, &stdout, Some(&stderr))
        .unwrap();
    std::fs::write(&stdout, "out 1\nout 2").unwrap();
    std::fs::write(&stderr, "err\n").unwrap();
    log.finish().await;
    let request = |stream: v1::LogStream| v1::LogsRequest {
        stream: stream.into(),
        ..Default::default()
    };
    assert_eq!(
        fixture.read(request(v1::LogStream::Stdout)).await,
        "out 1\nout 2"
    );
    assert_eq!(fixture.read(request(v1::LogStream::Stderr)).await, "err\n");
    assert_eq!(fixture.store.tail_for_message(&fixture.id).await.len(), 15);
}

#[tokio::test]
async fn tail_since_and_previous_attempts() {
    let mut fixture = Fixture::new(1 << 20);
    let (log, mut writer) = fixture.start();
    writer.write_all(b"1\n2\n3\n").unwrap();
    drop(writer);
    log.finish().await;
    let tail = |lines| v1::LogsRequest {
        tail_lines: Some(lines),
        ..Default::default()
    };
    assert_eq!(fixture.read(tail(2)).await, "2\n3\n");
    assert_eq!(fixture.read(tail(0)).await, "");
    assert_eq!(fixture.read(tail(10)).await, "1\n2\n3\n");
    let future = prost_types::Timestamp {
        seconds: 1 << 33,
        nanos: 0,
    };
    let since = v1::LogsRequest {
        since: Some(future),
        ..Default::default()
    };
    assert_eq!(fixture.read(since).await, "");

    fixture.id.attempt = 1;
    assert_eq!(fixture.read(v1::LogsRequest::default()).await, "");
    fixture.store.remove_older(&fixture.id).await.unwrap();
    fixture.id.attempt = 0;
    assert_eq!(fixture.read(tail(1)).await, "3\n");
    fixture.id.attempt = 2;
    fixture.store.remove_older(&fixture.id).await.unwrap();
    fixture.id.attempt = 0;
    assert_eq!(fixture.read(tail(1)).await, "");
}

#[tokio::test]
async fn following_neither_loses_nor_repeats_across_rotations() {
    // Rotates every few lines; five files hold more than a reader lags behind.
    let fixture = Fixture::new(64 << 10);
    let (log, mut writer) = fixture.start();
    let (running, is_running) = watch::channel(true);
    let request = v1::LogsRequest {
        follow: true,
        ..Default::default()
    };
    let reader = tokio::spawn(collect(fixture.store.read(
        &fixture.id,
        &request,
        is_running,
    )));
    let mut expected = String::new();
    for number in 0..2000 {
        let line = format!("line {number} {}\n", "x".repeat(number % 200));
        expected.push_str(&line);
        writer.write_all(line.as_bytes()).unwrap();
        // Lets the reader keep up: rotation drops what nobody read in time.
        if number % 50 == 0 {
            tokio::task::yield_now().await;
        }
    }
    drop(writer);
    log.finish().await;
    running.send(false).unwrap();
    let read = reader.await.unwrap();
    assert_eq!(read.lines().count(), 2000);
    assert!(read == expected);
    assert!(
        fixture
            .store
            .files(&fixture.id)
            .unwrap()
            .open_all()
            .unwrap()
            .len()
            > 2
    );
}

#[tokio::test]
async fn a_follower_waits_for_output_and_ends_with_the_container() {
    let fixture = Fixture::new(1 << 20);
    let (running, is_running) = watch::channel(true);
    let request = v1::LogsRequest {
        follow: true,
        ..Default::default()
    };
    // Before there is any file.
    let mut stream = fixture.store.read(&fixture.id, &request, is_running);
    let (log, mut writer) = fixture.start();
    for text in ["first\n", "second\n"] {
        writer.write_all(text.as_bytes()).unwrap();
        let next = tokio::time::timeout(DEADLINE, stream.next()).await.unwrap();
        assert_eq!(next.unwrap().unwrap(), text);
    }
    writer.write_all(b"last words").unwrap();
    drop(writer);
    log.finish().await;
    running.send(false).unwrap();
    assert_eq!(collect(stream).await, "last words");
}

#[tokio::test]
async fn a_follower_ends_when_nobody_knows_the_container_any_more() {
    let fixture = Fixture::new(1 << 20);
    let (running, is_running) = watch::channel(true);
    let request = v1::LogsRequest {
        follow: true,
        ..Default::default()
    };
    let stream = fixture.store.read(&fixture.id, &request, is_running);
    drop(running);
    assert_eq!(collect(stream).await, "");
}

#[tokio::test]
async fn a_copy_goes_on_after_a_restart() {
    let fixture = Fixture::new(1 << 20);
    let (log, mut writer) = fixture.start();
    writer.write_all(b"before\n").unwrap();
    let (_running, is_running) = watch::channel(true);
    let request = v1::LogsRequest {
        follow: true,
        ..Default::default()
    };
    let mut stream = fixture.store.read(&fixture.id, &request, is_running);
    let first = tokio::time::timeout(DEADLINE, stream.next()).await.unwrap();
    assert_eq!(first.unwrap().unwrap(), "before\n");
    // containerd's shim keeps both ends of the FIFO open; so does this test.
    let fifo = fixture.folder.path().join("stdout");
    let _reading_end = OpenOptions::new().read(true).open(&fifo).unwrap();
    drop(log);
    writer.write_all(b"between\n").unwrap();

    let log = fixture.store.start(&fixture.id, &fifo, None).unwrap();
    writer.write_all(b"after\n").unwrap();
    log.finish().await;
    assert_eq!(
        fixture.read(v1::LogsRequest::default()).await,
        "before\nbetween\nafter\n"
    );
}

#[tokio::test]
async fn what_is_no_fifo_is_refused_and_names_cannot_escape() {
    let fixture = Fixture::new(1 << 20);
    let file = fixture.folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(fixture.store.start(&fixture.id, &file, None).is_err());
    let id = LogId {
        container: "../x".to_owned(),
        ..fixture.id.clone()
    };
    assert!(fixture.store.start(&id, &file, None).is_err());
    fixture.store.remove("uid").await.unwrap();
    fixture.store.remove("uid").await.unwrap();
    assert!(fixture.store.remove("..").await.is_err());
}
