//! `$(NAME)` in values of variables, as in a Pod (k8s.io/kubernetes/third_party/forked/golang/expansion).

use std::collections::HashMap;

use super::environment::Variable;

/// The variables with every `$(NAME)` replaced by the value of an earlier variable. What names no earlier variable stays
/// as it is; `$$` stands for `$`.
pub(super) fn expand(variables: &[Variable]) -> Vec<Variable> {
    let mut known: HashMap<&str, String> = HashMap::new();
    let mut all = Vec::with_capacity(variables.len());
    for (name, value) in variables {
        let value = expand_one(value, &known);
        known.insert(name, value.clone());
        all.push((name.clone(), value));
    }
    all
}

fn expand_one(text: &str, known: &HashMap<&str, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        out.push_str(before);
        if let Some(after) = after.strip_prefix('$') {
            out.push('$');
            rest = after;
            continue;
        }
        match after.strip_prefix('(').and_then(|reference| reference.split_once(')')) {
            Some((name, after)) if known.contains_key(name) => {
                out.push_str(&known[name]);
                rest = after;
            }
            _ => {
                out.push('$');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out
}
