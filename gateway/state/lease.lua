-- Takes, or holds on to, the lease of the one controller that may act.
--
-- KEYS: 1 lease · 2 counter of fencing tokens
-- ARGV: 1 owner · 2 time to live, ms · 3 the highest fencing token that anybody has seen (the counter may have been lost)
-- Returns {fencing token, ""} when the owner holds it, else {0, who holds it}.
local held = redis.call('GET', KEYS[1])
if held then
  local fence, owner = string.match(held, '^(%d+) (.*)$')
  if owner ~= ARGV[1] then
    return {0, held}
  end
  if tonumber(fence) >= tonumber(ARGV[3]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {tonumber(fence), ''}
  end
end
local fence = redis.call('INCR', KEYS[2])
if fence <= tonumber(ARGV[3]) then
  fence = tonumber(ARGV[3]) + 1
  redis.call('SET', KEYS[2], fence)
end
redis.call('SET', KEYS[1], fence .. ' ' .. ARGV[1], 'PX', ARGV[2])
return {fence, ''}
