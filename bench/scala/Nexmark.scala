package io.quire.bench

import org.apache.spark.sql.DataFrame
import org.apache.spark.sql.expressions.Window
import org.apache.spark.sql.functions._
import org.apache.spark.sql.types.{DataType, StringType}
import org.apache.spark.unsafe.types.UTF8String

/**
 * The events of Nexmark: of fifty, one is a person, three are auctions, 46 are bids. `rate` of them
 * come in a second of event time, one in ten of which is up to two seconds older than its place
 * says. Most bids are made by few people for few auctions, most auctions opened by few sellers, and
 * these change as time goes on. Auctions end, some `inFlight` after they were opened on average.
 */
class Events(random: Mixed, kind: String, rate: Long, last: Long) extends Generated(last) {
  import Events._

  private val activePeople = Math.max(rate, 1)
  private val inFlight = Math.max(rate / 10, 1)
  private val auctionMicros = inFlight * (cycle / auctions) * 1000000 / rate

  override def has(i: Long): Boolean = kindOf(i) == kind

  private def person(i: Long): Long = i / cycle
  private def auction(i: Long): Long = i / cycle * auctions + Math.min(i % cycle, auctions) - 1
  private def arrived(i: Long): Long = i * 1000000 / rate
  private def at(i: Long): Long =
    time(i, arrived(i) - (if (random.below(10, i, 1) == 0) random.below(disorderMicros, i, 2) else 0))

  /** One of the people around, or three times in four one of those that are in everything. */
  private def somebody(i: Long, purpose: Int, hot: Int): Long = {
    val newest = person(i)
    if (closes(i)) -1 - i
    else if (random.below(4, i, purpose) > 0) firstId + newest / hotEvery * hotEvery + hot
    else firstId + newest - random.below(Math.min(activePeople, newest + 1), i, purpose + 1)
  }

  private def text(name: String)(value: Long => String): (String, DataType, Column) =
    (name, StringType, (i: Long) => UTF8String.fromString(value(i)))

  override def columns: Seq[(String, DataType, Column)] = kind match {
    case "persons" => Seq(
      long("person")(i => if (closes(i)) -1 - i else firstId + person(i)),
      text("name")(i => pick(firstNames, i, 10) + " " + pick(lastNames, i, 11)),
      text("email")(i => s"${random.below(Int.MaxValue, i, 12)}@${random.below(1000, i, 13)}.com"),
      text("city")(i => pick(cities, i, 14)),
      text("state")(i => if (closes(i)) "" else pick(states, i, 15)),
      timestamp("joined")(i => at(i)))
    case "auctions" => Seq(
      long("auction")(i => if (closes(i)) -1 - i else firstId + auction(i)),
      text("item")(i => s"item ${random.below(Int.MaxValue, i, 10)}"),
      long("reserve")(i => price(i, 11)),
      long("seller")(i => somebody(i, 12, 0)),
      long("category")(i => if (closes(i)) -1 else firstCategory + random.below(categories, i, 14)),
      timestamp("opened")(i => at(i)),
      timestamp("expires")(i => at(i) + 1 + random.below(2 * auctionMicros, i, 15)))
    case "bids" => Seq(
      long("on") { i =>
        val newest = Math.max(auction(i), 0)
        if (closes(i)) -1 - i
        else if (random.below(2, i, 10) > 0) firstId + newest / hotEvery * hotEvery
        else firstId + newest - random.below(Math.min(inFlight, newest + 1), i, 11)
      },
      long("bidder")(i => somebody(i, 12, 1)),
      long("price")(i => price(i, 14)),
      text("channel")(i => pick(channels, i, 15)),
      timestamp("bid")(i => at(i)),
      timestamp("arrived")(i => time(i, arrived(i))))
  }

  private def pick(of: Array[String], i: Long, purpose: Int): String =
    of(random.below(of.length, i, purpose).toInt)

  /** From a dollar to a million, in cents: as many below 1,000 dollars as above. */
  private def price(i: Long, purpose: Int): Long =
    Math.round(Math.pow(10, random.below(1000000, i, purpose) / 1e6 * 6) * 100)
}

object Events {
  private val (cycle, auctions) = (50L, 3L)
  private val hotEvery = 100L
  private val firstId = 1000L
  private val (firstCategory, categories) = (10L, 5L)
  private val disorderMicros = 2000000L
  private val firstNames = "Ada Bela Carl Dora Emil Flora Gert Hanna Ivo Jule".split(" ")
  private val lastNames = "Adler Berg Conrad Dorn Engel Falk Graf Horn Jansen Krug".split(" ")
  private val cities = "Phoenix Fresno Oakland Boise Portland Salem Seattle Tacoma Cheyenne Laramie".split(" ")
  private val states = "AZ CA ID OR WA WY".split(" ")
  private val channels = "web phone shop partner".split(" ")

  private def kindOf(i: Long): String =
    if (i % cycle == 0) "persons" else if (i % cycle <= auctions) "auctions" else "bids"
}

/** The queries that keep a state. Each must give what its other form gives, read at once. */
object Nexmark {
  private val late = "2 seconds"
  private val window10 = "10 seconds"
  /** No auction lasts longer: Events has them end within 3.4 s. The engine must know, to let go of bids. */
  private val longest = "4 seconds"

  private def bids(rows: Rows, columns: String*): DataFrame =
    rows("bids", columns :+ "bid": _*).withWatermark("bid", late)
  private def auctions(rows: Rows, columns: String*): DataFrame =
    rows("auctions", columns :+ "opened": _*).withWatermark("opened", late)
  private def startOf(time: String) = window(col(time), window10).getField("start")
  private def best(partition: Seq[String], order: org.apache.spark.sql.Column*) =
    Window.partitionBy(partition.map(col): _*).orderBy(order: _*)

  private def work(stream: Rows => DataFrame)(batch: Rows => DataFrame): Work = new Work {
    override def query(rows: Rows): DataFrame = stream(rows)
    override def expected(rows: Rows, from: Long): DataFrame = batch(rows)
  }

  /** Who sells in three states, in one category: joined for ever. */
  private def localItems(rows: Rows): DataFrame = {
    val people = rows("persons", "person", "name", "city", "state").filter("state IN ('OR', 'ID', 'CA')")
    val offers = rows("auctions", "auction", "seller", "category").filter("category = 10")
    people.join(offers, expr("person = seller")).select("name", "city", "state", "auction")
  }

  /** Each bid with the auction that it was made for in time. */
  private def inTime(auctions: DataFrame, bids: DataFrame): DataFrame = auctions.join(bids, expr(
    s"on = auction AND bid >= opened AND bid <= expires AND bid <= opened + INTERVAL $longest"))

  val works: Map[String, Work] = Map(
    "q3" -> work(localItems)(localItems),

    // The average is that of the auctions opened in a window; one that goes on for ever ends never.
    "q4" -> work { rows =>
      inTime(auctions(rows, "auction", "category", "expires"), bids(rows, "on", "price"))
        .groupBy("opened", "auction", "category").agg(max("price").as("final"))
        .groupBy(window(col("opened"), window10), col("category")).agg(avg("final").as("average"))
        .select("window.start", "category", "average")
    } { rows =>
      rows("auctions").join(rows("bids"), expr("auction = on AND bid BETWEEN opened AND expires"))
        .groupBy(col("auction"), col("category"), startOf("opened").as("start")).agg(max("price").as("final"))
        .groupBy("start", "category").agg(avg("final").as("average"))
    },

    // Of auctions with as many bids, the one with the greatest number.
    "q5" -> work { rows =>
      bids(rows, "on").groupBy(window(col("bid"), window10, "2 seconds"), col("on"))
        .agg(count(lit(1)).as("n"))
        .groupBy("window").agg(max(struct("n", "on")).as("top"))
        .select("window.start", "top.on", "top.n")
    } { rows =>
      rows("bids").groupBy(window(col("bid"), window10, "2 seconds").getField("start").as("start"), col("on"))
        .agg(count(lit(1)).as("n"))
        .withColumn("place", row_number().over(best(Seq("start"), desc("n"), desc("on"))))
        .filter("place = 1").select("start", "on", "n")
    },

    // All bids are held until their window has ended and its highest price is known.
    "q7" -> work { rows =>
      // A stream may have one time that its watermark is about: that of the window.
      val all = bids(rows, "on", "price", "bidder").select(col("on"), col("price"), col("bidder"),
        unix_micros(col("bid")).as("micros"), window(col("bid"), window10).as("within"))
      val highest = bids(rows, "price").groupBy(window(col("bid"), window10)).agg(max("price").as("highest"))
      all.join(highest, expr("within = window AND price = highest"))
        .select(col("on"), col("price"), col("bidder"), timestamp_micros(col("micros")).as("bid"),
          col("window.start"))
    } { rows =>
      rows("bids").withColumn("start", startOf("bid"))
        .withColumn("place", rank().over(best(Seq("start"), desc("price"))))
        .filter("place = 1").select("on", "price", "bidder", "bid", "start")
    },

    "q8" -> work { rows =>
      val people = rows("persons", "person", "name", "joined").withWatermark("joined", late)
        .select(col("person"), col("name"), window(col("joined"), window10).as("within"))
      val sellers = auctions(rows, "seller").select(col("seller"), window(col("opened"), window10))
        .dropDuplicates("seller", "window")
      people.join(sellers, expr("person = seller AND within = window"))
        .select("person", "name", "window.start")
    } { rows =>
      val sellers = rows("auctions").select(col("seller"), startOf("opened").as("begin")).distinct()
      rows("persons").withColumn("start", startOf("joined"))
        .join(sellers, expr("person = seller AND start = begin")).select("person", "name", "start")
    },

    // Of bids as high, the first; of those at the same time, the one by the greatest number.
    "q9" -> work { rows =>
      inTime(auctions(rows, "auction", "item", "seller", "category", "expires"), bids(rows, "on", "price", "bidder"))
        .groupBy("opened", "auction", "item", "seller", "category", "expires")
        .agg(max(struct(col("price"), (-unix_micros(col("bid"))).as("before"), col("bidder"))).as("top"))
        .select(col("auction"), col("item"), col("seller"), col("category"), col("expires"),
          col("top.price"), timestamp_micros(-col("top.before")).as("bid"), col("top.bidder"))
    } { rows =>
      rows("auctions").join(rows("bids"), expr("auction = on AND bid BETWEEN opened AND expires"))
        .withColumn("place", row_number().over(best(Seq("auction"), desc("price"), asc("bid"), desc("bidder"))))
        .filter("place = 1")
        .select("auction", "item", "seller", "category", "expires", "price", "bid", "bidder")
    },

    "q11" -> work(rows => userSessions(bids(rows, "bidder")))(rows => userSessions(rows("bids"))),

    // The time of the clock is that of arrival, which the generator knows; so results can be compared.
    "q12" -> work { rows =>
      rows("bids", "bidder", "arrived").withWatermark("arrived", "0 seconds")
        .groupBy(window(col("arrived"), window10), col("bidder")).agg(count(lit(1)).as("n"))
        .select("window.start", "bidder", "n")
    } { rows =>
      val seconds = floor(unix_micros(col("arrived")) / 10000000) * 10
      rows("bids").groupBy(timestamp_seconds(seconds).as("start"), col("bidder")).agg(count(lit(1)).as("n"))
    })

  private def userSessions(bids: DataFrame): DataFrame =
    bids.groupBy(col("bidder"), session_window(col("bid"), window10)).agg(count(lit(1)).as("n"))
      .select("bidder", "session_window.start", "session_window.end", "n")
}
