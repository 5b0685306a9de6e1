-- Health of a MegatronInference for Argo CD: the value of
-- resource.customizations.health.inference.megatron.dev_MegatronInference in the ConfigMap argocd-cm.
local status = obj.status
if status == nil or status.observedGeneration ~= obj.metadata.generation then
  return { status = "Progressing", message = "waiting for the operator" }
end
local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end
local function is_true(kind)
  return found[kind] ~= nil and found[kind].status == "True"
end
if is_true("Degraded") then
  return { status = "Degraded", message = found["Degraded"].message }
end
if is_true("Ready") and not is_true("Progressing") then
  return { status = "Healthy", message = found["Ready"].message }
end
local message = found["Progressing"] and found["Progressing"].message or "waiting for the operator"
return { status = "Progressing", message = message }
