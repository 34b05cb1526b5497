//! What the sandboxes of this host hold of it, and whether there is room for more.

use std::cmp::Reverse;
use std::collections::HashMap;

use jiff::Timestamp;
use sandman_protocol::v1;
use tracing::warn;

use super::manager::{Entry, Sandboxes, Ungiven, WishError};
use super::resize::{fits, grows, is_resize, keep_sizes};
use crate::spec::resources::{Qos, qos};

impl Sandboxes {
    /// Takes a changed wish for a sandbox that is here; sizes only as far as there is room.
    pub(super) fn change(
        &self,
        entries: &mut HashMap<String, Entry>,
        uid: &str,
        wish: v1::SandboxSpec,
        now: Timestamp,
    ) -> std::io::Result<()> {
        let resized = self.give(entries, uid, wish, now)?;
        if resized {
            // It may have given something back.
            self.retry(entries, now);
        }
        Ok(())
    }

    /// Looks again at resizes that there was no room for.
    pub(super) fn retry_ungiven(&self) {
        let mut entries = self.lock();
        self.retry(&mut entries, Timestamp::now());
    }

    fn retry(&self, entries: &mut HashMap<String, Entry>, now: Timestamp) {
        let waiting = entries.iter().filter(|(_, entry)| !entry.removing);
        let mut waiting: Vec<_> = waiting
            .filter_map(|(uid, entry)| Some((turn(entry)?, uid.clone())))
            .collect();
        if waiting.is_empty() {
            return;
        }
        waiting.sort();
        let mut any = false;
        for (_, uid) in waiting {
            let Some(wish) = entries.get(&uid).map(|entry| entry.wish().clone()) else {
                continue;
            };
            match self.give(entries, &uid, wish, now) {
                Ok(given) => any |= given,
                // It is looked at again when the next sandbox goes.
                Err(error) => {
                    warn!(pod_uid = uid, %error, "cannot write the record of a resize");
                }
            }
        }
        if any {
            self.weigh_burstable(entries);
        }
    }

    /// Whether the sandbox got other sizes.
    fn give(
        &self,
        entries: &mut HashMap<String, Entry>,
        uid: &str,
        wish: v1::SandboxSpec,
        now: Timestamp,
    ) -> std::io::Result<bool> {
        let Some(entry) = entries.get(uid) else {
            return Ok(false);
        };
        let asked = is_resize(&entry.spec, &wish);
        let refusal = if asked {
            let (wanted, has) = (request(&wish), request(&entry.spec));
            let others = self.used(entries, Some(uid));
            fits(wanted, has, others, self.allocatable).err()
        } else {
            None
        };
        let Some(entry) = entries.get_mut(uid) else {
            return Ok(false);
        };
        let spec = match &refusal {
            Some(_) => keep_sizes(&entry.spec, wish.clone()),
            None => wish.clone(),
        };
        if spec != entry.spec {
            self.host.store.write_spec(&spec)?;
            entry.spec = spec.clone();
        }
        let since = entry.ungiven.as_ref().map_or(now, |before| before.since);
        let given = asked && refusal.is_none();
        entry.ungiven = refusal.is_some().then_some(Ungiven { wish, since });
        entry
            .shared
            .send(|inbox| (inbox.spec, inbox.pending) = (Some(spec), refusal));
        Ok(given)
    }

    /// What all sandboxes but one hold.
    fn used(&self, entries: &HashMap<String, Entry>, except: Option<&str>) -> v1::Resources {
        let holding = entries.iter().filter(|(uid, _)| {
            let report = self.host.board.report(uid);
            let over = report.is_some_and(|report| {
                matches!(
                    report.lifecycle(),
                    v1::Lifecycle::Finished | v1::Lifecycle::Removed
                )
            });
            Some(uid.as_str()) != except && !over
        });
        let mut used = v1::Resources::default();
        for (_, entry) in holding {
            add(&mut used, &entry.spec);
        }
        used
    }

    /// Whether a new sandbox fits beside those that are here.
    pub(super) fn check_room(
        &self,
        entries: &HashMap<String, Entry>,
        spec: &v1::SandboxSpec,
    ) -> Result<(), WishError> {
        let used = self.used(entries, None);
        let free = [
            (
                "cpu",
                self.allocatable.cpu_millis,
                used.cpu_millis,
                request(spec).cpu_millis,
            ),
            (
                "memory",
                self.allocatable.memory_bytes,
                used.memory_bytes,
                request(spec).memory_bytes,
            ),
            (
                "ephemeral-storage",
                self.allocatable.ephemeral_storage_bytes,
                used.ephemeral_storage_bytes,
                request(spec).ephemeral_storage_bytes,
            ),
            ("pods", self.allocatable.pods, used.pods, 1),
        ];
        for (what, total, used, asked) in free {
            if asked > total.saturating_sub(used) {
                return Err(WishError::NoRoom(format!(
                    "insufficient {what}: requested {asked}, used {used}, capacity {total}"
                )));
            }
        }
        Ok(())
    }
}

/// Whose turn comes first (`sortPendingResizes` of `pkg/kubelet/allocation`): who asks for no more
/// than it has, then priority, class, and who has waited longest.
fn turn(entry: &Entry) -> Option<(bool, Reverse<i32>, bool, Timestamp)> {
    let ungiven = entry.ungiven.as_ref()?;
    Some((
        grows(request(&entry.spec), request(&ungiven.wish)),
        Reverse(ungiven.wish.priority),
        qos(&ungiven.wish) != Qos::Guaranteed,
        ungiven.since,
    ))
}

/// What a sandbox asks for.
pub(super) fn request(spec: &v1::SandboxSpec) -> v1::Resources {
    spec.requests.unwrap_or_default()
}

fn add(used: &mut v1::Resources, spec: &v1::SandboxSpec) {
    let wish = request(spec);
    used.cpu_millis = used.cpu_millis.saturating_add(wish.cpu_millis);
    used.memory_bytes = used.memory_bytes.saturating_add(wish.memory_bytes);
    used.ephemeral_storage_bytes = used
        .ephemeral_storage_bytes
        .saturating_add(wish.ephemeral_storage_bytes);
    used.pods += 1;
}
