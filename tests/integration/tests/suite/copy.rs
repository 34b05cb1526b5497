//! `kubectl cp` both ways, with and without a tar in the image.

use anyhow::{Result, ensure};
use k8s_openapi::api::core::v1::Container;
use sandman_integration::{PodBuilder, Scope, Transport, images};

async fn round_trip(scope: &Scope, pod: &str, folder: &str) -> Result<()> {
    let local = tempfile::tempdir()?;
    let tree = local.path().join("tree");
    std::fs::create_dir_all(tree.join("deep/er"))?;
    let mut data = vec![0_u8; 3 << 20];
    for (index, byte) in data.iter_mut().enumerate() {
        *byte = u8::try_from(index % 251)?;
    }
    std::fs::write(tree.join("deep/er/data.bin"), &data)?;
    std::fs::write(tree.join("empty"), b"")?;
    for transport in Transport::ALL {
        let kubectl = scope.kubectl_over(transport);
        let remote = format!("{pod}:{folder}/tree-{transport:?}");
        kubectl
            .run(&["cp", &tree.to_string_lossy(), &remote])
            .await?
            .ok()?;
        let back = local.path().join(format!("back-{transport:?}"));
        kubectl
            .run(&["cp", &remote, &back.to_string_lossy()])
            .await?
            .ok()?;
        ensure!(
            std::fs::read(back.join("deep/er/data.bin"))? == data,
            "{transport:?}: data"
        );
        ensure!(
            std::fs::read(back.join("empty"))?.is_empty(),
            "{transport:?}: empty file"
        );
    }
    Ok(())
}

fn plain(image: String) -> Container {
    Container {
        name: "main".to_owned(),
        image: Some(image),
        ..Default::default()
    }
}

#[test]
fn the_python_image_copies_both_ways() {
    Scope::run(|scope| async move {
        let mut container = plain(images::python(&scope.cluster));
        container.command = Some(vec!["sleep".to_owned(), "1000000".to_owned()]);
        scope
            .ready_pod(&PodBuilder::new("python").container(container).build())
            .await?;
        round_trip(&scope, "python", "/tmp").await?;
        let output = scope
            .kubectl()
            .run(&["exec", "python", "--", "python3", "-c", "print(6 * 7)"])
            .await?
            .ok()?;
        ensure!(output.text() == "42\n", "{output:?}");
        Ok(())
    });
}

#[test]
fn an_image_without_tar_copies_both_ways() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("scratch")
            .container(plain(images::scratch(&scope.cluster)))
            .build();
        scope.ready_pod(&pod).await?;
        round_trip(&scope, "scratch", "").await?;
        // Into a folder that exists: kubectl asks for `test -d`, which the image lacks too.
        let local = tempfile::tempdir()?;
        let file = local.path().join("late");
        std::fs::write(&file, b"came later")?;
        let kubectl = scope.kubectl();
        kubectl
            .run(&["cp", &file.to_string_lossy(), "scratch:/tree-Spdy"])
            .await?
            .ok()?;
        let back = local.path().join("back");
        kubectl
            .run(&["cp", "scratch:/tree-Spdy/late", &back.to_string_lossy()])
            .await?
            .ok()?;
        ensure!(
            std::fs::read(&back)? == b"came later",
            "the copied file differs"
        );
        Ok(())
    });
}
