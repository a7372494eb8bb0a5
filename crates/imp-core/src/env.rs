//! `$(NAME)` in the values of variables and in a workload's command, as in a Pod
//! (k8s.io/kubernetes/third_party/forked/golang/expansion): `$(NAME)` is the value of a variable that is known, `$$` is `$`,
//! and everything else, references to what is not known among it, stays as it is. What is put in is not looked at again.
//!
//! Values may be Secrets': nothing here prints or keeps one.

use std::collections::BTreeMap;

/// Variables in order, each with the references to *earlier* ones replaced. Of a name that comes more than once, a reference
/// means the latest before it; all of them are returned.
#[must_use]
pub fn expand(variables: &[(String, String)]) -> Vec<(String, String)> {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let expanded = variables.iter().map(|(name, value)| {
        let value = expand_one(value, &known);
        known.insert(name.clone(), value.clone());
        (name.clone(), value)
    });
    expanded.collect()
}

/// A command (spec.command, spec.args) with references to the environment replaced. What an image says its command is, is
/// not expanded in Kubernetes: do not pass it.
#[must_use]
pub fn expand_argv(argv: &[String], environment: &BTreeMap<String, String>) -> Vec<String> {
    argv.iter().map(|argument| expand_one(argument, environment)).collect()
}

/// Keeps a text as it is through [`expand`] and [`expand_argv`]: each `$` becomes `$$`.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('$', "$$")
}

fn expand_one(text: &str, known: &BTreeMap<String, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        let reference = after.strip_prefix('(');
        rest = if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            after
        } else if let Some((name, after)) = reference.and_then(|inner| inner.split_once(')')) {
            match known.get(name) {
                Some(value) => out.push_str(value),
                // As a whole: a `$` in a name that is not known neither escapes nor begins a reference.
                None => out.extend(["$(", name, ")"]),
            }
            after
        } else {
            out.push('$');
            after
        };
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn known() -> BTreeMap<String, String> {
        let pairs =
            [("VAR_A", "A"), ("VAR_B", "B"), ("VAR_C", "C"), ("VAR_REF", "$(VAR_A)"), ("VAR_EMPTY", "")];
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).into()
    }

    /// The cases of Kubernetes' own test (expand_test.go).
    #[test]
    fn references_are_kubernetes() {
        for (text, expected) in [
            ("$(VAR_A)", "A"),
            ("___$(VAR_B)___", "___B___"),
            ("$(VAR_A)_$(VAR_B)_$(VAR_C)", "A_B_C"),
            ("$$(VAR_B)_$(VAR_A)", "$(VAR_B)_A"),
            ("$$(VAR_A)_$$(VAR_B)", "$(VAR_A)_$(VAR_B)"),
            ("f000-$$VAR_A", "f000-$VAR_A"),
            ("foo\\$(VAR_C)bar", "foo\\Cbar"),
            ("$(VAR_A$(VAR_B))", "$(VAR_A$(VAR_B))"),
            ("$(VAR_A$(VAR_B)", "$(VAR_A$(VAR_B)"),
            ("$(VAR_REF)", "$(VAR_A)"),
            ("%%$(VAR_REF)--$(VAR_REF)%%", "%%$(VAR_A)--$(VAR_A)%%"),
            ("foo$(VAR_EMPTY)bar", "foobar"),
            ("foo$(VAR_Awhoops!", "foo$(VAR_Awhoops!"),
            ("f00__(VAR_A)__", "f00__(VAR_A)__"),
            ("$?_boo_$!", "$?_boo_$!"),
            ("$VAR_A", "$VAR_A"),
            ("$(VAR_DNE)", "$(VAR_DNE)"),
            ("$$$$$$(BIG_MONEY)", "$$$(BIG_MONEY)"),
            ("$$$$$$(VAR_A)", "$$$(VAR_A)"),
            ("$$$$$$$(GOOD_ODDS)", "$$$$(GOOD_ODDS)"),
            ("$$$$$$$(VAR_A)", "$$$A"),
            ("$VAR_A)", "$VAR_A)"),
            ("${VAR_A}", "${VAR_A}"),
            ("$(VAR_B)_______$(A", "B_______$(A"),
            ("$(VAR_C)_______$(", "C_______$("),
            ("$(VAR_A)foobarzab$", "Afoobarzab$"),
            ("--$($($($($--", "--$($($($($--"),
            ("$($($($($--foo$(", "$($($($($--foo$("),
            ("$(foo$$var)", "$(foo$$var)"),
            ("\n", "\n"),
            ("prefix-$€-suffix", "prefix-$€-suffix"),
            ("$中文", "$中文"),
        ] {
            assert_eq!(expand_one(text, &known()), expected, "{text}");
        }
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn only_earlier_variables_are_known_and_the_latest_counts() {
        let given = [
            ("URL", "http://$(HOST):$(PORT)"),
            ("HOST", "db"),
            ("PORT", "5432"),
            ("URL", "http://$(HOST):$(PORT)"),
            ("HOST", "$(HOST).example"),
            ("LINK", "$(URL) $(HOST) $(LINK)"),
        ];
        let expected = [
            ("URL", "http://$(HOST):$(PORT)"),
            ("HOST", "db"),
            ("PORT", "5432"),
            ("URL", "http://db:5432"),
            ("HOST", "db.example"),
            ("LINK", "http://db:5432 db.example $(LINK)"),
        ];
        assert_eq!(expand(&pairs(&given)), pairs(&expected));
    }

    #[test]
    fn arguments_see_the_environment() {
        let argv = ["sh", "-c", "echo $(VAR_A) $$(VAR_A) $(nothing) $HOME"].map(str::to_owned);
        assert_eq!(expand_argv(&argv, &known()), ["sh", "-c", "echo A $(VAR_A) $(nothing) $HOME"]);
    }

    proptest! {
        #[test]
        fn an_escaped_text_stays_as_it_is(text in "[$()A-C_€]{0,24}|\\PC{0,24}") {
            prop_assert_eq!(expand_one(&escape(&text), &known()), text);
        }

        #[test]
        fn a_text_without_a_dollar_stays_as_it_is(text in "[^$]{0,24}") {
            prop_assert_eq!(expand_one(&text, &known()), text);
        }

        /// With nothing known only `$$` changes, and nothing but dollars goes.
        #[test]
        fn what_is_not_known_is_kept(text in "[$()AB]{0,24}") {
            let out = expand_one(&text, &BTreeMap::new());
            let plain = |text: &str| text.replace('$', "");
            prop_assert_eq!(plain(&out), plain(&text));
        }
    }
}
