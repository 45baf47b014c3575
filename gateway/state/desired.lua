-- The writer of desired state: all writes of one change, or none.
--
-- KEYS: 1 revision · 2 audit stream · 3 tombstones · 4 identity · 5... the hash "desired:<Kind>" of each write, in order
-- ARGV: 1 site revision that the caller validated against · 2 channel · 3 actor · 4 time, unix · 5 audit entries to keep
--       6 the identity that a store gets with its first write; then six a write: kind, name, generation that must be stored (0 = absent), generation to store,
--       object ("" = delete), audit action
-- Returns {"ok", revision} · {"stale", revision} when the site changed since the caller read it ·
--         {"conflict", kind, name, stored generation}
local revision = tonumber(redis.call('GET', KEYS[1]) or '0')
if tonumber(ARGV[1]) ~= revision then
  return {'stale', revision}
end

local function write_at(i)
  local at = 7 + (i - 1) * 6
  return {
    hash = KEYS[4 + i], kind = ARGV[at], name = ARGV[at + 1], from = ARGV[at + 2], to = ARGV[at + 3],
    object = ARGV[at + 4], action = ARGV[at + 5],
  }
end

local before = {}
for i = 1, #KEYS - 4 do
  local write = write_at(i)
  local stored = redis.call('HGET', write.hash, write.name)
  local generation = 0
  if stored then
    generation = cjson.decode(stored).generation
  end
  if generation ~= tonumber(write.from) then
    return {'conflict', write.kind, write.name, generation}
  end
  before[i] = stored or ''
end

redis.call('SET', KEYS[4], ARGV[6], 'NX')
revision = redis.call('INCR', KEYS[1])
for i = 1, #KEYS - 4 do
  local write = write_at(i)
  local key = write.kind .. '/' .. write.name
  if write.object == '' then
    redis.call('HDEL', write.hash, write.name)
    redis.call('HSET', KEYS[3], key, write.to)
  else
    redis.call('HSET', write.hash, write.name, write.object)
    redis.call('HDEL', KEYS[3], key)
  end
  redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*',
    'revision', revision, 'kind', write.kind, 'name', write.name, 'action', write.action, 'actor', ARGV[3],
    'time', ARGV[4], 'generation_from', write.from, 'generation_to', write.to, 'from', before[i], 'to', write.object)
end
redis.call('PUBLISH', ARGV[2], revision)
return {'ok', revision}
