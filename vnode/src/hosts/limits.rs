//! Caps on what a host says about itself and about what happens on it.

use sandman_protocol::v1;

/// Longest text of an inventory, in bytes.
const MAX_TEXT: usize = 256;
/// Images and names of an image. A node's status shows fewer of both.
const MAX_IMAGES: usize = 1000;
const MAX_NAMES: usize = 16;
const MAX_RUNTIME_HANDLERS: usize = 64;
const MAX_CONDITIONS: usize = 16;
/// Longest message of a condition or an event, in bytes.
const MAX_MESSAGE: usize = 1024;

/// Shortens a text to at most `limit` bytes.
pub(super) fn clip(text: &mut String, limit: usize) {
    if text.len() > limit {
        text.truncate(text.floor_char_boundary(limit));
        text.shrink_to_fit();
    }
}

/// Shortens an inventory to what a host can have to say; of the images, the
/// largest stay.
pub(super) fn inventory(mut inventory: v1::Inventory) -> v1::Inventory {
    let images = &mut inventory.images;
    if images.len() > MAX_IMAGES {
        images.sort_by_key(|image| std::cmp::Reverse(image.size_bytes));
    }
    cut(images, MAX_IMAGES);
    for image in images {
        cut(&mut image.names, MAX_NAMES);
        // A shorter name would be another image's.
        image.names.retain(|name| name.len() <= MAX_MESSAGE);
    }
    let handlers = &mut inventory.runtime_handlers;
    cut(handlers, MAX_RUNTIME_HANDLERS);
    handlers.retain(|name| name.len() <= MAX_TEXT);
    cut(&mut inventory.conditions, MAX_CONDITIONS);
    for condition in &mut inventory.conditions {
        clip(&mut condition.message, MAX_MESSAGE);
    }
    for text in [
        &mut inventory.host_name,
        &mut inventory.pod_cidr,
        &mut inventory.architecture,
        &mut inventory.operating_system,
        &mut inventory.kernel_version,
        &mut inventory.os_image,
        &mut inventory.boot_id,
        &mut inventory.machine_id,
        &mut inventory.runtime_version,
    ] {
        clip(text, MAX_TEXT);
    }
    inventory
}

/// Shortens an event.
pub(super) fn event(mut event: v1::SandboxEvent) -> v1::SandboxEvent {
    for text in [
        &mut event.uid,
        &mut event.namespace,
        &mut event.name,
        &mut event.reason,
        &mut event.container,
    ] {
        clip(text, MAX_TEXT);
    }
    clip(&mut event.message, MAX_MESSAGE);
    event
}

fn cut<T>(list: &mut Vec<T>, limit: usize) {
    if list.len() > limit {
        list.truncate(limit);
        list.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prost::Message;

    #[test]
    fn texts_end_between_characters() {
        let mut text = "aüü".to_owned();
        clip(&mut text, 4);
        assert_eq!(text, "aü");
        clip(&mut text, 3);
        assert_eq!(text, "aü");
    }

    #[test]
    fn a_huge_inventory_becomes_small() {
        let text = "x".repeat(100_000);
        let image = |size| v1::Image {
            names: vec!["name".to_owned(); 100],
            size_bytes: size,
        };
        let huge = v1::Inventory {
            kernel_version: text.clone(),
            images: (0..5000).map(image).collect(),
            runtime_handlers: vec![text.clone(); 100],
            conditions: vec![
                v1::HostCondition {
                    message: text,
                    ..Default::default()
                };
                100
            ],
            ..Default::default()
        };
        let cut = inventory(huge);
        assert!(cut.encoded_len() < 256 << 10);
        assert_eq!(cut.images[0].size_bytes, 4999);
        assert!(cut.runtime_handlers.is_empty());
    }

    #[test]
    fn a_usual_inventory_stays_as_it_is() {
        let usual = v1::Inventory {
            host_name: "host-0".to_owned(),
            images: vec![v1::Image {
                names: vec!["registry.example/image:tag".to_owned()],
                size_bytes: 1,
            }],
            runtime_handlers: vec!["runc".to_owned()],
            ..Default::default()
        };
        assert_eq!(inventory(usual.clone()), usual);
    }
}
