{{/* Full name of an image: call with (dict "root" $ "name" "imp-agent"). */}}
{{- define "imp.image" -}}
{{ .root.Values.image.registry }}/{{ .name }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{/* Labels of every object. */}}
{{- define "imp.labels" -}}
app.kubernetes.io/name: imp
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Labels that select a component's pods; they never change. */}}
{{- define "imp.selector" -}}
app.kubernetes.io/name: imp
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "imp.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
- name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The name that the operator's certificate bears. */}}
{{- define "imp.operatorHost" -}}
imp-controller-manager.{{ .Release.Namespace }}.svc
{{- end -}}
