(() => {
  const { shards, follow } = JSON.parse(find("data").textContent);
  player.load(shards, follow, asked.get("round"));
})();
