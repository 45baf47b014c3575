-- Leases part of a tenant's quotas to one gateway: two token buckets, on the clock of the store.
--
-- KEYS: 1 hash of the tenant
-- ARGV: two buckets of four: name, refill a second (0 = no such quota), capacity, what is wanted
-- Returns what is given of each, as decimal text; as much as is wanted of a quota that does not exist.
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1e6
local given = {}
local longest = 1
for i = 0, 1 do
  local name, rate, capacity, want = ARGV[i * 4 + 1], tonumber(ARGV[i * 4 + 2]), tonumber(ARGV[i * 4 + 3]), tonumber(ARGV[i * 4 + 4])
  if rate <= 0 then
    given[i + 1] = tostring(want)
  else
    local stored = redis.call('HMGET', KEYS[1], name, name .. '_at')
    local level = capacity
    if stored[1] and stored[2] then
      level = math.min(capacity, tonumber(stored[1]) + math.max(0, now - tonumber(stored[2])) * rate)
    end
    local part = math.max(0, math.min(want, level))
    redis.call('HSET', KEYS[1], name, string.format('%.6f', level - part), name .. '_at', string.format('%.6f', now))
    given[i + 1] = string.format('%.6f', part)
    longest = math.max(longest, capacity / rate)
  end
end
redis.call('PEXPIRE', KEYS[1], math.ceil(longest * 1000) + 1000)
return given
