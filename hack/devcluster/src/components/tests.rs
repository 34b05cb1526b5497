use super::*;

fn component() -> Component {
    Component::new("x", None, vec!["/bin/true".to_owned()])
}

fn layout(dir: &Path) -> Layout {
    Layout::open(dir, &dir.join("state")).unwrap()
}

#[test]
fn the_fingerprint_follows_all_that_decides_how_a_component_runs() {
    let dir = tempfile::tempdir().unwrap();
    let layout = layout(dir.path());
    let input = dir.path().join("input");
    fs::write(&input, "a").unwrap();
    let mut base = component();
    base.inputs.push(input.clone());
    let before = base.fingerprint(&layout);
    assert_eq!(before, base.clone().fingerprint(&layout));

    let changes: [fn(&mut Component); 3] = [
        |c| c.argv.push("--flag".to_owned()),
        |c| c.env.push(("A".to_owned(), "b".to_owned())),
        |c| c.files.push(("/x".into(), "y".to_owned())),
    ];
    for change in changes {
        let mut changed = base.clone();
        change(&mut changed);
        assert_ne!(before, changed.fingerprint(&layout));
    }
    fs::write(&input, "longer").unwrap();
    assert_ne!(before, base.fingerprint(&layout));
}

#[test]
fn hosts_together_offer_less_than_the_machine_has() {
    let one = host::memory_share(1);
    for hosts in [2, 3, 32] {
        assert!(host::memory_share(hosts) * u64::from(hosts) <= one);
    }
    assert!(one > 0);
}

#[test]
fn toml_values_are_quoted() {
    assert_eq!(toml_string("a"), r#""a""#);
    assert_eq!(
        toml_path(Path::new(r#"/a"b"#))
            .parse::<toml::Value>()
            .unwrap()
            .as_str(),
        Some(r#"/a"b"#)
    );
}
