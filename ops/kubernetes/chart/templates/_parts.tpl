{{- define "modelyard.container" -}}
image: {{ .Values.image }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
env:
  - { name: MODELYARD_SITE, value: {{ .Values.site | quote }} }
  - { name: MODELYARD_CACHE, value: {{ printf "%s/cache" .Values.artifacts.path | quote }} }
  - { name: MODELYARD_GRPC_PORT, value: {{ .Values.ports.grpc | quote }} }
  - { name: MODELYARD_HTTP_PORT, value: {{ .Values.ports.http | quote }} }
  - { name: MODELYARD_REDIS, valueFrom: { secretKeyRef: { name: {{ .Values.secretName }}, key: redis } } }
  - { name: MODELYARD_RAY_REDIS, valueFrom: { secretKeyRef: { name: {{ .Values.secretName }}, key: redisAddress } } }
  - { name: MODELYARD_SECRET, valueFrom: { secretKeyRef: { name: {{ .Values.secretName }}, key: secret } } }
  - { name: MODELYARD_POD_IP, valueFrom: { fieldRef: { fieldPath: status.podIP } } }
  - { name: RAY_worker_niceness, value: "0" }
{{- if .Values.tlsSecretName }}
  - { name: MODELYARD_TLS_CERT, value: /tls/tls.crt }
  - { name: MODELYARD_TLS_KEY, value: /tls/tls.key }
{{- if .Values.mutualTls }}
  - { name: MODELYARD_TLS_CLIENT_CA, value: /tls/ca.crt }
{{- end }}
{{- end }}
{{- end }}

{{- define "modelyard.mounts" -}}
volumeMounts:
  - { name: artifacts, mountPath: {{ .Values.artifacts.path }} }
  - { name: shm, mountPath: /dev/shm }
{{- if .Values.tlsSecretName }}
  - { name: tls, mountPath: /tls, readOnly: true }
{{- end }}
{{- end }}

{{- define "modelyard.volumes" -}}
volumes:
  - { name: artifacts, persistentVolumeClaim: { claimName: {{ .Values.artifacts.claimName }} } }
{{- if .Values.tlsSecretName }}
  - { name: tls, secret: { secretName: {{ .Values.tlsSecretName }} } }
{{- end }}
{{- end }}
