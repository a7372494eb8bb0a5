//! The API reference (`docs/api.md`), generated from the CRDs so that it cannot say anything else than the API server does.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, JSONSchemaProps, JSONSchemaPropsOrArray,
};
use std::fmt::Write as _;

/// Fields whose schema is Kubernetes' own and documented there; their inner fields are not listed again.
const CORE_TYPES: &[&str] = &["env", "envFrom", "tolerations", "conditions", "imagePullSecrets"];

/// Renders the reference of `crds` as Markdown.
#[must_use]
pub fn reference(crds: &[CustomResourceDefinition]) -> String {
    let mut out = String::from(
        "# API reference\n\nGenerated from the CRDs by `cargo xtask crds`; do not edit. `kubectl explain <kind>.spec` shows the same.\n\n\
         | kind | short | scope | purpose |\n|---|---|---|---|\n",
    );
    for crd in crds {
        let names = &crd.spec.names;
        let short = names.short_names.iter().flatten().cloned().collect::<Vec<_>>().join(", ");
        let purpose = root_schema(crd).and_then(|s| s.description.as_deref()).map_or("", first_sentence);
        let _ = writeln!(
            out,
            "| [{kind}](#{anchor}) | {short} | {scope} | {purpose} |",
            kind = names.kind,
            anchor = names.kind.to_lowercase(),
            scope = crd.spec.scope,
            purpose = cell(purpose),
        );
    }
    for crd in crds {
        kind_section(&mut out, crd);
    }
    out
}

fn root_schema(crd: &CustomResourceDefinition) -> Option<&JSONSchemaProps> {
    crd.spec.versions.first()?.schema.as_ref()?.open_api_v3_schema.as_ref()
}

fn kind_section(out: &mut String, crd: &CustomResourceDefinition) {
    let Some(root) = root_schema(crd) else { return };
    let _ = writeln!(out, "\n## {}\n", crd.spec.names.kind);
    if let Some(text) = &root.description {
        let _ = writeln!(out, "{text}\n");
    }
    let properties = root.properties.iter().flatten();
    for (name, schema) in properties.filter(|(name, _)| matches!(name.as_str(), "spec" | "status")) {
        let _ = writeln!(out, "### {}.{name}\n", crd.spec.names.kind);
        out.push_str("| field | type | default | meaning |\n|---|---|---|---|\n");
        rows(out, schema, "");
        rules(out, schema);
    }
}

fn rows(out: &mut String, schema: &JSONSchemaProps, prefix: &str) {
    let required = schema.required.clone().unwrap_or_default();
    for (name, field) in schema.properties.iter().flatten() {
        let path = if prefix.is_empty() { name.clone() } else { format!("{prefix}.{name}") };
        let mark = if required.contains(name) { " (required)" } else { "" };
        let default = field.default.as_ref().map(|d| format!("`{}`", d.0)).unwrap_or_default();
        let _ = writeln!(
            out,
            "| `{path}`{mark} | {kind} | {default} | {text} |",
            kind = cell(&type_of(field)),
            default = cell(&default),
            text = cell(field.description.as_deref().unwrap_or_default()),
        );
        if CORE_TYPES.contains(&name.as_str()) {
            continue;
        }
        let (inner, suffix) = match &field.items {
            Some(JSONSchemaPropsOrArray::Schema(item)) => (item.as_ref(), "[]"),
            _ => (field, ""),
        };
        rows(out, inner, &format!("{path}{suffix}"));
    }
}

fn type_of(schema: &JSONSchemaProps) -> String {
    let untyped = if schema.x_kubernetes_int_or_string == Some(true) { "integer or string" } else { "any" };
    let base = schema.type_.as_deref().unwrap_or(untyped);
    let mut text = match (&schema.items, base) {
        (Some(JSONSchemaPropsOrArray::Schema(item)), "array") => format!("list of {}", type_of(item)),
        _ => base.to_owned(),
    };
    if let Some(values) = &schema.enum_ {
        let values = values.iter().filter(|v| !v.0.is_null()).map(|v| v.0.to_string().replace('"', ""));
        let _ = write!(text, ": {}", values.collect::<Vec<_>>().join(", "));
    }
    match (schema.minimum, schema.maximum) {
        (Some(min), Some(max)) => {
            let _ = write!(text, ", {min} to {max}");
        }
        (Some(min), None) => {
            let _ = write!(text, ", at least {min}");
        }
        (None, Some(max)) => {
            let _ = write!(text, ", at most {max}");
        }
        (None, None) => {}
    }
    text
}

fn rules(out: &mut String, schema: &JSONSchemaProps) {
    let mut messages = Vec::new();
    collect_rules(schema, "", &mut messages);
    if messages.is_empty() {
        return;
    }
    out.push_str("\nRules, checked by the API server:\n\n");
    for (path, message) in messages {
        let place = if path.is_empty() { String::new() } else { format!("`{path}`: ") };
        let _ = writeln!(out, "- {place}{message}");
    }
}

fn collect_rules(schema: &JSONSchemaProps, path: &str, found: &mut Vec<(String, String)>) {
    for rule in schema.x_kubernetes_validations.iter().flatten() {
        let message = rule.message.clone().unwrap_or_else(|| format!("`{}`", rule.rule));
        found.push((path.to_owned(), message));
    }
    for (name, field) in schema.properties.iter().flatten() {
        let inner = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        collect_rules(field, &inner, found);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(item)) = &schema.items {
        collect_rules(item, &format!("{path}[]"), found);
    }
}

/// One line of a Markdown table.
fn cell(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn first_sentence(text: &str) -> &str {
    text.split_once(". ").map_or(text, |(first, _)| first).trim_end_matches('.')
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    #[test]
    fn reference_in_the_tree_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
        let wanted = super::reference(&crate::crds());
        if std::env::var_os("IMP_UPDATE").is_some() {
            std::fs::write(&path, &wanted).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == wanted, "docs/api.md is out of date: run `cargo xtask crds`");
    }
}
