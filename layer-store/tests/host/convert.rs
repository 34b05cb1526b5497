//! The converter as a process.

use std::{
    fs,
    io::{Cursor, Write},
    path::Path,
};

use sandman_layer_store::{
    LayerIndex,
    convert::{Conversion, ConvertError},
    layout::{BLOB, INDEX, META, SEALED},
};

use crate::support::{archive, convert, gzip, helper, order};

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
#[ignore = "needs root"]
fn a_layer_is_published_whole_or_not_at_all() {
    let work = tempfile::tempdir().unwrap();
    let at = |name: &str| work.path().join(name);
    let archive = archive(1, 100);
    let converted = convert(&archive, &at("staging")).unwrap();
    assert_eq!(converted.index().tar_size(), archive.len() as u64);
    converted.publish(&at("layer")).unwrap();
    assert_eq!(names(work.path()), ["layer"]);
    assert_eq!(names(&at("layer")), [BLOB, INDEX, META, SEALED]);
    assert!(fs::read(at("layer").join(BLOB)).unwrap() == archive);
    LayerIndex::open(&at("layer").join(INDEX)).unwrap();
    // Somebody else was faster.
    convert(&archive, &at("staging"))
        .unwrap()
        .publish(&at("layer"))
        .unwrap();
    assert_eq!(names(work.path()), ["layer"]);

    let mut wrong = gzip(&archive);
    let order = order(&wrong, &archive);
    wrong.truncate(1000);
    let error = Conversion::run(&helper(), order, at("staging"), Cursor::new(wrong)).unwrap_err();
    assert!(matches!(error, ConvertError::WrongBlob { .. }), "{error}");
    assert_eq!(names(work.path()), ["layer"]);
}

#[test]
#[ignore = "needs root"]
fn it_runs_as_nobody_and_may_do_nothing() {
    let work = tempfile::tempdir().unwrap();
    let blob = gzip(&archive(2, 100));
    let order = order(&blob, b"");
    let (conversion, mut input) =
        Conversion::start(&helper(), order, work.path().join("staging")).unwrap();
    // More than a pipe and the first reads take: it waits for the rest, confined.
    input.write_all(&blob[..blob.len() / 2]).unwrap();
    let status = loop {
        let status = fs::read_to_string(format!("/proc/{}/status", conversion.id())).unwrap();
        // The filter is the last that it enters.
        if status.contains("Seccomp:\t2") {
            break status;
        }
        std::thread::yield_now();
    };
    for line in [
        "Uid:\t65534\t65534\t65534\t65534",
        "Gid:\t65534\t65534\t65534\t65534",
        "CapEff:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "NoNewPrivs:\t1",
    ] {
        assert!(status.contains(line), "no {line:?} in {status}");
    }
    let id = conversion.id();
    drop(conversion);
    assert!(!Path::new(&format!("/proc/{id}")).exists());
    assert_eq!(names(work.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn a_converter_that_dies_is_reported() {
    let work = tempfile::tempdir().unwrap();
    let blob = gzip(&archive(3, 100));
    let (conversion, mut input) =
        Conversion::start(&helper(), order(&blob, b""), work.path().join("staging")).unwrap();
    input.write_all(&blob[..100]).unwrap();
    let id = nix::unistd::Pid::from_raw(conversion.id().cast_signed());
    nix::sys::signal::kill(id, nix::sys::signal::SIGKILL).unwrap();
    let error = conversion.finish().unwrap_err();
    assert!(error.to_string().contains("killed by SIGKILL"), "{error}");
    let no_helper = Conversion::start(
        Path::new("/nonexistent/sandman-layer-filler"),
        order(&blob, b""),
        work.path().join("staging"),
    );
    let error = no_helper.err().unwrap().to_string();
    assert!(
        error.contains("/nonexistent/sandman-layer-filler"),
        "{error}"
    );
    assert_eq!(names(work.path()), [""; 0]);
}

#[test]
#[ignore = "needs root"]
fn layers_are_converted_side_by_side() {
    let work = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6)
            .map(|seed| {
                let staging = work.path().join(seed.to_string());
                scope.spawn(move || {
                    convert(&archive(seed, 200), &staging)
                        .unwrap()
                        .index()
                        .layer()
                })
            })
            .collect();
        let layers: std::collections::HashSet<_> = threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect();
        assert_eq!(layers.len(), 6);
    });
    assert_eq!(names(work.path()), [""; 0]);
}
