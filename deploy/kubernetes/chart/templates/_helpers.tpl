{{- define "twostep.selector" -}}
app.kubernetes.io/name: twostep
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "twostep.metadata" -}}
metadata:
  name: {{ .Release.Name }}
  labels:
    {{- include "twostep.selector" . | nindent 4 }}
    app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}
