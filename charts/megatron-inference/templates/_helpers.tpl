{{- /* Names are quoted wherever they are used: YAML reads 123, 1e3, no and null as other values than text. */}}

{{- define "megatron.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-operator" .Release.Name) (hasSuffix "operator" .Release.Name)) }}
{{- if gt (len $name) 52 }}{{ printf "%s-%s" ($name | trunc 43 | trimAll "-.") (sha256sum $name | trunc 8) }}{{ else }}{{ $name }}{{ end }}
{{- end }}

{{- /* Objects of the cluster are named by namespace and release, which no other release has. Neither contains a colon. */}}
{{- define "megatron.clusterName" -}}
megatron-operator:{{ .Release.Namespace }}:{{ .Release.Name }}
{{- end }}

{{- /* The name of a Service begins with a letter and has no dot. */}}
{{- define "megatron.serviceName" -}}
{{ printf "%s-%s" .purpose (include "megatron.fullname" .root | replace "." "-") }}
{{- end }}

{{- define "megatron.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "megatron-operator" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "megatron.labels" -}}
{{ include "megatron.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end }}

{{- /* The chart's own labels, which selectors match, then the labels of a value. */}}
{{- define "megatron.labelsWith" -}}
{{ merge (include "megatron.labels" .root | fromYaml) (.more | default dict) | toYaml }}
{{- end }}

{{- /* Not empty where the cluster assigns user and group IDs. Absent after an upgrade that reuses the values of an earlier
chart. */}}
{{- define "megatron.openshift" -}}
{{- $value := toString .Values.openshift }}
{{- $detected := .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- if or (eq $value "true") (and (ne $value "false") $detected) }}true{{ end }}
{{- end }}

{{- define "megatron.podSecurity" -}}
runAsNonRoot: true
{{- if not (include "megatron.openshift" .) }}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "megatron.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "megatron.fullname" .) }}
{{- end }}

{{- define "megatron.image" -}}
{{ .image.repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}
