//! Images: entry points, users, and pulls that cannot work.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::core::v1::{Container, Event, Pod};
use sandman_integration::{
    PodBuilder, Scope, container_state, images, is_ready, wait_event, wait_pod,
};

fn of(image: String) -> Container {
    Container {
        name: "main".to_owned(),
        image: Some(image),
        ..Default::default()
    }
}

fn waits_for(pod: &Pod, reasons: &[&str]) -> bool {
    container_state(pod, "main")
        .and_then(|state| state.waiting.as_ref())
        .and_then(|waiting| waiting.reason.as_deref())
        .is_some_and(|reason| reasons.contains(&reason))
}

#[test]
fn the_images_user_and_entrypoint_are_kept() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("user")
            .container(of(images::nonroot(&scope.cluster)))
            .build();
        scope.ready_pod(&pod).await?;
        let id = scope
            .kubectl()
            .run(&["exec", "user", "--", "id", "-u"])
            .await?
            .ok()?
            .text();
        ensure!(id == "1000\n", "{id:?}");
        Ok(())
    });
}

#[test]
fn arguments_replace_only_the_images_arguments() {
    Scope::run(|scope| async move {
        let mut container = of(images::python(&scope.cluster));
        container.command = Some(vec!["python3".to_owned()]);
        container.args = Some(vec![
            "-c".to_owned(),
            "print('from', __import__('os').getcwd())".to_owned(),
        ]);
        let pod = PodBuilder::new("args")
            .restart_policy("Never")
            .container(container)
            .build();
        scope.create_pod(&pod).await?;
        wait_pod(&scope.api(), "args", "succeeded", |pod: &Pod| {
            sandman_integration::is_phase(pod, "Succeeded")
        })
        .await?;
        let text = scope.kubectl().run(&["logs", "args"]).await?.ok()?.text();
        ensure!(text == "from /testbed\n", "{text:?}");
        Ok(())
    });
}

#[test]
fn a_missing_image_is_named_and_waited_for() {
    Scope::run(|scope| async move {
        let image = format!("{}/no-such-image:1", scope.cluster.images);
        scope
            .create_pod(
                &PodBuilder::new("absent")
                    .container(of(image.clone()))
                    .build(),
            )
            .await?;
        let pod = wait_pod(
            &scope.api(),
            "absent",
            "waiting for its image",
            |pod: &Pod| waits_for(pod, &["ErrImagePull", "ImagePullBackOff"]),
        )
        .await?;
        ensure!(
            sandman_integration::is_phase(&pod, "Pending"),
            "{:?}",
            pod.status
        );
        wait_event(&scope.api::<Event>(), "absent", "Failed", &image).await?;
        wait_event(&scope.api::<Event>(), "absent", "BackOff", &image).await?;
        Ok(())
    });
}

#[test]
fn a_malformed_image_name_is_refused() {
    Scope::run(|scope| async move {
        let pod = PodBuilder::new("name")
            .container(of("Not A Name".to_owned()))
            .build();
        scope.create_pod(&pod).await?;
        let pod = wait_pod(&scope.api(), "name", "refused", |pod: &Pod| {
            waits_for(pod, &["InvalidImageName"])
        })
        .await?;
        let message = container_state(&pod, "main")
            .and_then(|state| state.waiting.as_ref())
            .and_then(|waiting| waiting.message.as_deref())
            .context("message")?;
        ensure!(message.contains("Not A Name"), "{message}");
        Ok(())
    });
}

#[test]
fn an_image_that_must_be_present_is_not_pulled() {
    Scope::run(|scope| async move {
        let mut container = of(format!("{}/no-such-image:2", scope.cluster.images));
        container.image_pull_policy = Some("Never".to_owned());
        scope
            .create_pod(&PodBuilder::new("never").container(container).build())
            .await?;
        wait_pod(
            &scope.api(),
            "never",
            "waiting for its image",
            |pod: &Pod| waits_for(pod, &["ErrImageNeverPull"]),
        )
        .await
        .map(drop)
    });
}

#[test]
fn one_bad_image_does_not_hold_up_other_pods() {
    Scope::run(|scope| async move {
        let image = format!("{}/no-such-image:3", scope.cluster.images);
        scope
            .create_pod(&PodBuilder::new("bad").container(of(image)).build())
            .await?;
        scope
            .create_pod(&PodBuilder::sleeper(&scope.cluster, "good").build())
            .await?;
        wait_pod(&scope.api(), "good", "ready", is_ready)
            .await
            .map(drop)
    });
}
