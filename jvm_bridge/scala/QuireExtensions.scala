package io.quire.spark

import org.apache.spark.sql.SparkSessionExtensions
import org.apache.spark.sql.catalyst.rules.Rule
import org.apache.spark.sql.execution.{ColumnarRule, SparkPlan}
import org.apache.spark.sql.execution.python.MapInArrowExec
import org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkExec
import org.apache.spark.sql.execution.streaming.operators.stateful.transformwithstate.{TransformWithStateExec, TransformWithStateExecBase}
import org.apache.spark.sql.execution.streaming.state.quire.SparkInternals
import org.apache.spark.sql.internal.SQLConf

/**
 * The session extension that lets transformWithState keep its state in Quire, and Python's
 * operators find the checkpoint of their query:
 * `spark.sql.extensions=io.quire.spark.QuireExtensions`. No other operator needs it.
 *
 * transformWithState accepts a state store by the name of its provider. This puts nodes in its
 * place that accept Quire's name too, and are the same in everything else.
 */
class QuireExtensions extends (SparkSessionExtensions => Unit) {
  override def apply(extensions: SparkSessionExtensions): Unit =
    extensions.injectColumnar(_ => new ColumnarRule {
      override def preColumnarTransitions: Rule[SparkPlan] =
        plan => TellCheckpoint(AcceptQuire(plan))
    })
}

/**
 * Tells the tasks of a micro-batch where the checkpoint of their query is, by a local property:
 * statestore/stateful.py. A rule is where Quire comes by in the thread that will start the jobs.
 */
private[spark] object TellCheckpoint extends Rule[SparkPlan] {
  val Property = "quire.checkpoint"

  override def apply(plan: SparkPlan): SparkPlan = {
    if (plan.exists(_.isInstanceOf[MapInArrowExec])) {
      val context = plan.session.sparkContext
      SparkInternals.checkpointOfQuery(plan.session)
        .foreach(context.setLocalProperty(Property, _))
    }
    plan
  }
}

/**
 * Swaps the nodes of transformWithState for those that accept Quire. It works as a columnar rule
 * because these run after the streaming engine has put version and watermark into the plan.
 */
private[spark] object AcceptQuire extends Rule[SparkPlan] {
  override def apply(plan: SparkPlan): SparkPlan = plan.transform {
    case node: AcceptsQuire => node
    // A batch query keeps its short-lived state in the store that Spark names, and passes anyway.
    case node: TransformWithStateExec if node.isStreaming => QuireTransformWithStateExec(node)
    case node: TransformWithStateInPySparkExec if node.isStreaming =>
      QuireTransformWithStateInPySparkExec(node)
  }
}

/** A node of transformWithState that accepts Quire as its store, beside those that Spark does. */
private[spark] trait AcceptsQuire extends TransformWithStateExecBase {

  // Plans look as they do without the extension.
  override def nodeName: String = super.nodeName.stripPrefix("Quire")

  override protected def validateStateStoreProvider(isStreaming: Boolean): Unit =
    if (conf.getConf(SQLConf.STATE_STORE_PROVIDER_CLASS) != AcceptsQuire.Provider) {
      super.validateStateStoreProvider(isStreaming)
    }
}

private[spark] object AcceptsQuire {
  val Provider = "io.quire.spark.QuireStateStoreProvider"
}
