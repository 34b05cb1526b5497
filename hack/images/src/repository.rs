//! Makes a git repository, the same one every time.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};

use crate::recipe::Commit;
use crate::tree::{EPOCH, Tree};

/// Puts a repository with `commits` and its work tree at `path` of `tree`.
pub(crate) fn put(
    path: &str,
    commits: &[Commit],
    folder: &Path,
    tree: &mut Tree,
) -> anyhow::Result<()> {
    let work = folder.join("repository");
    fs::create_dir(&work)?;
    let git = Git {
        work: work.clone(),
        home: folder.to_owned(),
    };
    git.run(
        &["init", "--quiet", "--initial-branch=main", "--template="],
        EPOCH,
    )?;
    for (commit, time) in commits.iter().zip((EPOCH..).step_by(3600)) {
        for (name, content) in commit.files {
            let file = work.join(name);
            fs::create_dir_all(file.parent().context("a file without a folder")?)?;
            fs::write(file, content)?;
        }
        git.run(&["add", "--all"], time)?;
        git.run(&["commit", "--quiet", "--message", commit.subject], time)?;
    }
    // An index without the inode numbers and times of this machine.
    git.run(&["read-tree", "HEAD"], EPOCH)?;

    for entry in walk(&work)? {
        let name = entry
            .strip_prefix(&work)?
            .to_str()
            .context("a name that is not UTF-8")?;
        let target = format!("{path}/{name}");
        // Reference logs hold no more than the history, and editing leftovers nothing.
        if name.starts_with(".git/logs") || name == ".git/COMMIT_EDITMSG" {
            continue;
        }
        if entry.is_dir() {
            tree.directory(&target, 0o755, 0);
        } else {
            tree.file(&target, 0o644, fs::read(&entry)?);
        }
    }
    Ok(())
}

struct Git {
    work: PathBuf,
    home: PathBuf,
}

impl Git {
    /// Runs git without any configuration of the machine or of the user.
    fn run(&self, args: &[&str], time: u64) -> anyhow::Result<()> {
        let date = format!("{time} +0000");
        let output = Command::new("git")
            .args(["-c", "gc.auto=0", "-c", "maintenance.auto=false"])
            .args(args)
            .current_dir(&self.work)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("HOME", &self.home)
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .envs(["AUTHOR", "COMMITTER"].into_iter().flat_map(|who| {
                [
                    (format!("GIT_{who}_NAME"), "Testbed".to_owned()),
                    (format!("GIT_{who}_EMAIL"), "testbed@sandman.dev".to_owned()),
                    (format!("GIT_{who}_DATE"), date.clone()),
                ]
            }))
            .stdin(Stdio::null())
            .output()
            .context("cannot run git")?;
        if !output.status.success() {
            bail!(
                "git {}: {}",
                args.join(" "),
                String::from_utf8_lossy(&output.stderr).trim_end()
            );
        }
        Ok(())
    }
}

/// Everything below `folder`, parents first.
fn walk(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut queue = vec![folder.to_owned()];
    while let Some(next) = queue.pop() {
        for entry in fs::read_dir(&next)? {
            let path = entry?.path();
            if path.is_dir() {
                queue.push(path.clone());
            }
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use crate::recipe::Commit;
    use crate::tree::Tree;

    #[test]
    fn two_runs_make_the_same_repository() {
        let commits = [
            Commit {
                subject: "One",
                files: &[("a/b", "1\n")],
            },
            Commit {
                subject: "Two",
                files: &[("a/b", "2\n"), ("c", "3\n")],
            },
        ];
        let archive = || {
            let folder = tempfile::tempdir().unwrap();
            let mut tree = Tree::default();
            super::put("repo", &commits, folder.path(), &mut tree).unwrap();
            assert_eq!(tree.content("repo/a/b"), Some(&b"2\n"[..]));
            assert_eq!(
                tree.content("repo/.git/HEAD"),
                Some(&b"ref: refs/heads/main\n"[..])
            );
            let mut bytes = Vec::new();
            tree.write(&mut bytes).unwrap();
            bytes
        };
        assert!(archive() == archive());
    }
}
