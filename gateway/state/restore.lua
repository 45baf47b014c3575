-- Gives back to the store what it lost (a failover to a replica that lagged, an old copy): name by name the higher
-- generation wins, deletions included. Any process may call it with what it holds, in any order, any number of times.
--
-- KEYS: 1 revision · 2 audit stream · 3 tombstones · 4 identity · 5... the hash "desired:<Kind>" of each name, in order
-- ARGV: 1 site revision that the caller holds · 2 channel · 3 actor · 4 time, unix · 5 audit entries to keep
--       6 the identity that the store must have, or "" = whatever it has · 7 the identity that it gets, or "" = stays
--       then four a name: kind, name, generation, object ("" = deleted)
-- Returns the number of names written; -1 when it is another store.
local identity = redis.call('GET', KEYS[4])
if ARGV[6] ~= '' and identity ~= ARGV[6] then
  return -1
end
local claimed = ARGV[7] ~= '' and identity ~= ARGV[7]
if claimed then
  redis.call('SET', KEYS[4], ARGV[7])
end
local written = 0
local revision = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1])) + 1
for i = 1, #KEYS - 4 do
  local at = 8 + (i - 1) * 4
  local hash, kind, name, generation, object = KEYS[4 + i], ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local key = kind .. '/' .. name
  local stored = redis.call('HGET', hash, name)
  local current = 0
  if stored then
    current = cjson.decode(stored).generation
  else
    current = tonumber(redis.call('HGET', KEYS[3], key) or '0')
  end
  if tonumber(generation) > current then
    if object == '' then
      redis.call('HDEL', hash, name)
      redis.call('HSET', KEYS[3], key, generation)
    else
      redis.call('HSET', hash, name, object)
      redis.call('HDEL', KEYS[3], key)
    end
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*',
      'revision', revision, 'kind', kind, 'name', name, 'action', 'restored', 'actor', ARGV[3],
      'time', ARGV[4], 'generation_from', current, 'generation_to', generation, 'from', stored or '', 'to', object)
    written = written + 1
  end
end
if written > 0 or claimed then
  redis.call('SET', KEYS[1], revision)
  redis.call('PUBLISH', ARGV[2], revision)
end
return written
