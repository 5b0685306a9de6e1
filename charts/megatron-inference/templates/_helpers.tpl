{{- /* Names are quoted wherever they are used: YAML reads 123, 1e3, no and null as other values than text. */}}

{{- define "megatron-inference.fullname" -}}
{{- $name := .Values.fullnameOverride | default (ternary .Release.Name (printf "%s-operator" .Release.Name) (hasSuffix "operator" .Release.Name)) }}
{{- if gt (len $name) 52 }}{{ printf "%s-%s" ($name | trunc 43 | trimAll "-.") (sha256sum $name | trunc 8) }}{{ else }}{{ $name }}{{ end }}
{{- end }}

{{- /* Objects of the cluster are named by namespace and release, which no other release has. Neither contains a colon. */}}
{{- define "megatron-inference.clusterName" -}}
megatron-operator:{{ .Release.Namespace }}:{{ .Release.Name }}
{{- end }}

{{- /* The name of a Service begins with a letter and has no dot. */}}
{{- define "megatron-inference.serviceName" -}}
{{ printf "%s-%s" .purpose (include "megatron-inference.fullname" .root | replace "." "-") }}
{{- end }}

{{- define "megatron-inference.selector" -}}
app.kubernetes.io/name: {{ .Values.nameOverride | default "megatron-operator" | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* Labels of all objects that no selector contains, because an upgrade changes them. */}}
{{- define "megatron-inference.commonLabels" -}}
app.kubernetes.io/part-of: megatron-inference
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end }}

{{- define "megatron-inference.labels" -}}
{{ include "megatron-inference.selector" . }}
{{ include "megatron-inference.commonLabels" . }}
{{- end }}

{{- /* The chart's own labels, which selectors match, then the labels of a value. */}}
{{- define "megatron-inference.labelsWith" -}}
{{ merge (include "megatron-inference.labels" .root | fromYaml) (.more | default dict) | toYaml }}
{{- end }}

{{- /* Not empty where the cluster assigns user and group IDs. Absent after an upgrade that reuses the values of an earlier
chart. */}}
{{- define "megatron-inference.openshift" -}}
{{- $value := toString .Values.openshift }}
{{- $detected := .Capabilities.APIVersions.Has "security.openshift.io/v1" }}
{{- if or (eq $value "true") (and (ne $value "false") $detected) }}true{{ end }}
{{- end }}

{{- define "megatron-inference.podSecurity" -}}
runAsNonRoot: true
{{- if not (include "megatron-inference.openshift" .) }}
runAsUser: 65532
runAsGroup: 65532
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "megatron-inference.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "megatron-inference.fullname" .) }}
{{- end }}

{{- /* global.imageRegistry replaces the registry of a repository: the part before the first slash that has a dot or a colon,
or is localhost. */}}
{{- define "megatron-inference.image" -}}
{{- $repository := .image.repository }}
{{- with (.root.Values.global).imageRegistry }}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" $repository "") }}
{{- end }}
{{- $repository }}{{ if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default .root.Chart.AppVersion }}{{ end }}
{{- end }}

{{- /* Names of the Secrets of imagePullSecrets and global.imagePullSecrets, each once, as a JSON list. */}}
{{- define "megatron-inference.pullSecrets" -}}
{{- $names := list }}
{{- range concat ((.Values.global).imagePullSecrets | default list) (.Values.imagePullSecrets | default list) }}
{{- if kindIs "string" . }}{{ $names = append $names . }}{{ else }}{{ $names = append $names .name }}{{ end }}
{{- end }}
{{- $names | uniq | toJson }}
{{- end }}

{{- /* The field of a pod's spec. */}}
{{- define "megatron-inference.imagePullSecrets" -}}
{{- with include "megatron-inference.pullSecrets" . | fromJsonArray }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}
