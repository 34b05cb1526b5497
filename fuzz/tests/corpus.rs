//! The corpus, input by input.

use sandman_fuzz::TARGETS;
use sandman_fuzz::engine::{corpus_of, read_corpus, run};

#[test]
fn nothing_that_was_found_breaks_anything() {
    for target in TARGETS {
        let corpus = read_corpus(&corpus_of(&target)).unwrap();
        assert!(!corpus.is_empty(), "{} has no corpus", target.name);
        for (path, input) in corpus {
            if let Err(text) = run(&target, &input) {
                panic!("{}: {text}", path.display());
            }
        }
    }
}
