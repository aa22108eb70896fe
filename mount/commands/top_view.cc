// SPDX-License-Identifier: Apache-2.0

#include "mount/commands/top_view.h"

#include <fmt/format.h>

#include <cstdint>

#include "core/base/strings.h"
#include "mount/control/step_json.h"
#include "mount/options.h"
#include "mount/printable.h"

namespace ckptfs {
namespace {

using TopTree = nlohmann::json;

// Counters of a status, and what their growth is called.
struct TopRate {
  const char* name;
  const char* pointer;  // to a number, or to an object of numbers
};
constexpr TopRate kTopRates[] = {
    {"requests", "/requests"},
    {"served", "/served"},
    {"source_bytes", "/bytes_read"},
    {"opens", "/opens"},
    {"opened_bytes", "/opened_bytes"},
    {"errors", "/errors"},
    {"hits", "/materialised/hits"},
    {"fills", "/materialised/fills"},
    {"evictions", "/materialised/evictions"},
    {"cpu", "/process/cpu_seconds"},
    {"durable", "/snapshots/durable"},
    {"dropped", "/snapshots/dropped_for"},
    {"peer_received_bytes", "/snapshots/peers/received_bytes"},
};

// Parts of a status that are told as they are.
constexpr const char* kTopFacts[] = {"view",         "open_files",   "materialised", "process",
                                     "listed_bytes", "loaded_bytes", "loaded_steps", "views",
                                     "plans",        "following",    "snapshots",    "runs",
                                     "passthrough",  "recent_errors"};

const TopTree& At(const TopTree& json, const char* pointer) {
  static const TopTree none;
  const TopTree::json_pointer at{std::string(pointer)};
  return json.contains(at) ? json.at(at) : none;
}

double NumberAt(const TopTree& json, const char* pointer) {
  const TopTree& value = At(json, pointer);
  return value.is_number() ? value.get<double>() : 0;
}

std::string TextAt(const TopTree& json, const char* pointer) {
  const TopTree& value = At(json, pointer);
  return value.is_string() ? value.get<std::string>() : "";
}

// A counter does not fall; one that does is another's.
double Growth(const TopTree& before, const TopTree& now, double seconds) {
  const double was = before.is_number() ? before.get<double>() : 0;
  return std::max(0.0, now.get<double>() - was) / seconds;
}

TopTree RatesOf(const TopTree& before, const TopTree& now, double seconds) {
  TopTree rates = TopTree::object();
  for (const TopRate& rate : kTopRates) {
    const TopTree& value = At(now, rate.pointer);
    const TopTree& old = At(before, rate.pointer);
    if (value.is_number()) rates[rate.name] = Growth(old, value, seconds);
    if (!value.is_object()) continue;
    TopTree& parts = rates[rate.name] = TopTree::object();
    for (const auto& [key, part] : value.items()) {
      const TopTree was = old.is_object() ? old.value(key, TopTree()) : TopTree();
      if (part.is_number()) parts[key] = Growth(was, part, seconds);
    }
  }
  return rates;
}

// ---- in words ------------------------------------------------------------------

std::string BytesText(double bytes) { return HumanBytes(static_cast<uint64_t>(bytes)); }

double SumOf(const TopTree& parts) {
  double sum = 0;
  for (const TopTree& part : parts) sum += part.is_number() ? part.get<double>() : 0;
  return sum;
}

// " (stream 1.0, direct 2.0)" of those that are not 0.
template <class Text>
std::string PartsText(const TopTree& parts, const Text& text) {
  std::string list;
  for (const auto& [name, value] : parts.items()) {
    if (!value.is_number() || value.template get<double>() == 0) continue;
    list += StrCat(list.empty() ? " (" : ", ", Printable(name), " ",
                   text(value.template get<double>()));
  }
  return list.empty() ? "" : list + ")";
}

std::string TenthsText(double number) { return fmt::format("{:.1f}", number); }
std::string RateText(double bytes) { return BytesText(bytes) + "/s"; }
std::string CountText(double number) { return fmt::format("{:.0f}", number); }

std::string TopHead(const TopTree& top) {
  const TopTree& now = top["now"];
  const std::string mountpoint = top.value("mountpoint", "");
  std::string text = mountpoint.empty() ? StrCat("daemon of ", Printable(top.value("store", "")))
                                        : Printable(mountpoint);
  text += StrCat(": pid ", top.value("pid", 0));
  const double start = NumberAt(now, "/process/start_time_seconds");
  if (start != 0) {
    text += StrCat(", started ", Ago(static_cast<int64_t>(start * 1e9)));
  }
  text += fmt::format(", {:.0f}% of a processor, {} resident", 100 * NumberAt(top, "/rates/cpu"),
                      BytesText(NumberAt(now, "/process/resident_bytes")));
  const std::string view = TextAt(now, "/view");
  return view.empty() ? text : StrCat(text, "; /view -> ", Printable(view));
}

std::string TopReads(const TopTree& top) {
  const TopTree& rates = top["rates"];
  const TopTree& served = At(rates, "/served");
  const TopTree& opens = At(rates, "/opens");
  std::string text =
      fmt::format("  reads      {}/s, {} served{}, {} from sources\n",
                  TenthsText(NumberAt(rates, "/requests/read")), RateText(SumOf(served)),
                  PartsText(served, RateText), RateText(NumberAt(rates, "/source_bytes")));
  text += fmt::format("  opens      {}/s{}, files of {}; {} open\n", TenthsText(SumOf(opens)),
                      PartsText(opens, TenthsText), RateText(SumOf(At(rates, "/opened_bytes"))),
                      CountText(NumberAt(top, "/now/open_files")));
  const TopTree& errors = At(rates, "/errors");
  if (SumOf(errors) == 0) return text;
  return text + fmt::format("  errors     {}/s{}\n", TenthsText(SumOf(errors)),
                            PartsText(errors, TenthsText));
}

std::string TopMemory(const TopTree& top) {
  const TopTree& now = top["now"];
  const double indexes = NumberAt(now, "/listed_bytes") + NumberAt(now, "/loaded_bytes") +
                         NumberAt(now, "/views/bytes") + NumberAt(now, "/plans/bytes");
  std::string text;
  if (now.value("materialised", TopTree()).is_object()) {
    text = fmt::format(
        "  cache      {} hits/s, {} fills/s, {} evictions/s; {} of {} filled, {} ready\n",
        TenthsText(NumberAt(top, "/rates/hits")), TenthsText(NumberAt(top, "/rates/fills")),
        TenthsText(NumberAt(top, "/rates/evictions")),
        BytesText(NumberAt(now, "/materialised/bytes")),
        BytesText(NumberAt(now, "/materialised/budget")),
        BytesText(NumberAt(now, "/materialised/idle_bytes")));
  }
  return text + fmt::format("  indexes    {} of {} loaded steps\n", BytesText(indexes),
                            CountText(NumberAt(now, "/loaded_steps")));
}

std::string TopFollow(const TopTree& follow) {
  std::string text = fmt::format("  follows    {}: {} adopted", Printable(TextAt(follow, "/path")),
                                 CountText(NumberAt(follow, "/adopted")));
  if (At(follow, "/lag_seconds").is_number()) {
    text += fmt::format(", the last {:.1f} s after its save, {}", NumberAt(follow, "/lag_seconds"),
                        Ago(static_cast<int64_t>(NumberAt(follow, "/last_adopted_ns"))));
  }
  const std::pair<const char*, const char*> kinds[] = {{"/waiting_steps", "not whole yet"},
                                                       {"/left_behind_steps", "left behind"},
                                                       {"/refused_steps", "refused"}};
  for (const auto& [pointer, name] : kinds) {
    const double count = NumberAt(follow, pointer);
    if (count != 0) text += StrCat(", ", CountText(count), " ", name);
  }
  return text + "\n";
}

// The texts of a list, a line each.
std::string LinesText(const TopTree& list) {
  std::string text;
  if (!list.is_array()) return text;
  for (const TopTree& line : list) {
    if (line.is_string()) text += StrCat("             ", Printable(line.get<std::string>()), "\n");
  }
  return text;
}

std::string PeersText(const TopTree& peers) {
  std::string away;
  size_t count = 0;
  const TopTree& list = At(peers, "/peers");
  for (size_t i = 0; i < list.size() && list.is_array(); ++i) {
    const std::string why = TextAt(list[i], "/away");
    if (why.empty()) continue;
    ++count;
    away += StrCat("             ", Printable(TextAt(list[i], "/host")), " ",
                   Printable(TextAt(list[i], "/address")), " is away: ", Printable(why), "\n");
  }
  std::string text =
      fmt::format("  peers      {}, {} away; {} of {} held for them and us\n{}", list.size(), count,
                  BytesText(NumberAt(peers, "/used")), BytesText(NumberAt(peers, "/memory")), away);
  const TopTree& protect = At(peers, "/protect");
  if (!protect.is_object()) return text;
  text += fmt::format(
      "  protect    {}: {} saves protected, {} passed over, {} met full memory\n",
      Printable(TextAt(protect, "/scheme")), CountText(NumberAt(protect, "/protected")),
      CountText(NumberAt(protect, "/passed_over")), CountText(NumberAt(protect, "/full")));
  return text + LinesText(At(protect, "/steps"));
}

std::string SpoolText(const TopTree& spool) {
  std::string text =
      fmt::format("  spool      {} of {}, {} saves; spooled: {}, no room: {}, failed: {}\n",
                  BytesText(NumberAt(spool, "/bytes")), BytesText(NumberAt(spool, "/budget")),
                  CountText(NumberAt(spool, "/saves")), CountText(NumberAt(spool, "/spooled")),
                  CountText(NumberAt(spool, "/full")), CountText(NumberAt(spool, "/failed")));
  const std::string failure = TextAt(spool, "/last_failure");
  return failure.empty() ? text : StrCat(text, "             ", Printable(failure), "\n");
}

}  // namespace

std::string SnapshotsText(const TopTree& snapshots) {
  const double durable = NumberAt(snapshots, "/durable");
  std::string text = fmt::format(
      "  snapshots  {} ranks; arenas {} of {}; {} incoming, {} waiting (oldest {:.1f} s)\n"
      "             {} durable",
      CountText(NumberAt(snapshots, "/ranks")), BytesText(NumberAt(snapshots, "/arena_bytes")),
      BytesText(NumberAt(snapshots, "/arena_limit_bytes")),
      CountText(NumberAt(snapshots, "/incoming")), CountText(NumberAt(snapshots, "/waiting")),
      NumberAt(snapshots, "/oldest_waiting_seconds"), CountText(durable));
  if (durable != 0) {
    text += fmt::format(" after {:.1f} s on average",
                        NumberAt(snapshots, "/durable_lag/seconds") / durable);
  }
  const double unproved = NumberAt(snapshots, "/unproved");
  if (unproved != 0) text += StrCat(" (", CountText(unproved), " unproved)");
  text += fmt::format(", {} dropped{}\n", CountText(NumberAt(snapshots, "/dropped")),
                      PartsText(At(snapshots, "/dropped_for"), CountText));
  const double full = NumberAt(snapshots, "/full_drops") + NumberAt(snapshots, "/full_waits");
  if (full != 0) {
    text += fmt::format("             full arenas: {} parts dropped, {} waited\n",
                        CountText(NumberAt(snapshots, "/full_drops")),
                        CountText(NumberAt(snapshots, "/full_waits")));
  }
  for (const char* last : {"/last_durable", "/last_drop"}) {
    const std::string line = TextAt(snapshots, last);
    if (!line.empty()) {
      text +=
          StrCat("             ",
                 last == std::string_view("/last_drop") ? "" : "durable: ", Printable(line), "\n");
    }
  }
  if (const std::string fails = TextAt(snapshots, "/last_failure"); !fails.empty()) {
    text +=
        StrCat("             the store did not take ", Printable(fails), "; it is tried again\n");
  }
  text += LinesText(At(snapshots, "/steps"));
  if (snapshots.contains("spool")) {
    text += SpoolText(At(snapshots, "/spool"));
  }
  if (snapshots.contains("peers")) text += PeersText(At(snapshots, "/peers"));
  for (const char* why : {"/retention/last_failure", "/hot/why_not"}) {
    const std::string line = TextAt(snapshots, why);
    if (!line.empty()) text += StrCat("             ", Printable(line), "\n");
  }
  return text;
}

TopTree TopJson(const TopSample* before, const TopSample& now) {
  TopTree top = {{"mountpoint", now.mountpoint}, {"store", now.store}, {"pid", now.pid},
                 {"seconds", nullptr},           {"rates", nullptr},   {"now", TopTree::object()}};
  for (const char* fact : kTopFacts) {
    if (now.status.contains(fact)) top["now"][fact] = now.status[fact];
  }
  const bool same = before != nullptr && before->pid == now.pid && before->time < now.time;
  if (!same) return top;
  const double seconds = std::chrono::duration<double>(now.time - before->time).count();
  top["seconds"] = seconds;
  top["rates"] = RatesOf(before->status, now.status, seconds);
  return top;
}

std::string TopText(const TopTree& top) {
  const TopTree& now = top["now"];
  std::string text = TopHead(top) + "\n";
  if (now.contains("open_files")) text += TopReads(top) + TopMemory(top);
  const TopTree following = now.value("following", TopTree::array());
  for (const TopTree& follow : following) text += TopFollow(follow);
  const TopTree snapshots = now.value("snapshots", TopTree());
  if (snapshots.is_object()) text += SnapshotsText(snapshots);
  return text;
}

}  // namespace ckptfs
