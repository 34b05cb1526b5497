//! Which tests to run: `selection.toml`, and what a mode makes of it.

use anyhow::Context;
use serde::Deserialize;

/// What to run, in the words of the command line.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode<'a> {
    /// Everything.
    Full,
    /// What is quick and passes on a real kubelet.
    Ci,
    /// What has a matching name.
    Focus(&'a str),
}

/// Regular expressions in the form that ginkgo takes them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    /// A test runs if its name matches one of these,
    pub(crate) focus: String,
    /// and none of these.
    pub(crate) skip: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Selection {
    focus: Vec<String>,
    skip: Vec<String>,
    full_focus: Vec<String>,
    full_skip: Vec<String>,
    ci_skip: Vec<String>,
}

/// The filter of a mode.
pub(crate) fn filter(mode: Mode<'_>) -> anyhow::Result<Filter> {
    let selection =
        toml::from_str(include_str!("../selection.toml")).context("hack/e2e/selection.toml")?;
    Ok(choose(selection, mode))
}

fn choose(selection: Selection, mode: Mode<'_>) -> Filter {
    let Selection {
        mut focus,
        mut skip,
        full_focus,
        full_skip,
        ci_skip,
    } = selection;
    match mode {
        Mode::Full => {
            focus.extend(full_focus);
            skip.extend(full_skip);
        }
        Mode::Ci => skip.extend(ci_skip),
        // Whoever asks for a test by name means it, though not by accident one that breaks things.
        Mode::Focus(regex) => focus = vec![regex.to_owned()],
    }
    Filter {
        focus: focus.join("|"),
        skip: skip.join("|"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection() -> Selection {
        let list = |items: &[&str]| items.iter().map(|&item| item.to_owned()).collect();
        Selection {
            focus: list(&["a", "b"]),
            skip: list(&["s"]),
            full_focus: list(&["c"]),
            full_skip: list(&["t"]),
            ci_skip: list(&["u", "v"]),
        }
    }

    #[test]
    fn modes_widen_or_narrow_the_selection() {
        for (mode, focus, skip) in [
            (Mode::Full, "a|b|c", "s|t"),
            (Mode::Ci, "a|b", "s|u|v"),
            (Mode::Focus("x.*"), "x.*", "s"),
        ] {
            let want = Filter {
                focus: focus.to_owned(),
                skip: skip.to_owned(),
            };
            assert_eq!(choose(selection(), mode), want, "{mode:?}");
        }
    }

    #[test]
    fn the_file_is_sound() {
        assert!(filter(Mode::Full).is_ok_and(|filter| filter.focus.contains("NodeConformance")));
    }
}
